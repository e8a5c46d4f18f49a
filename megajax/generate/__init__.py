"""Text generation on any mesh: `python -m megajax.generate --run-dir RUN --prompt TEXT`."""

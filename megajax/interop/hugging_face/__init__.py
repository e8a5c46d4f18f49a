"""Hugging Face's directories in and out: `python -m megajax.interop.hugging_face import DIR`, `export RUN`."""

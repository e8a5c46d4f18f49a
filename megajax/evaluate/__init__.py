"""Scores of a trained model on any layout: `python -m megajax.evaluate --task wikitext103 --data FILE --run-dir RUN`."""

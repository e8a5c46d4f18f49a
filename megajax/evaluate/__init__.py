"""Scores of a trained model on any layout: `python -m megajax.evaluate --task TASK --task-data FILE --run-dir RUN`."""

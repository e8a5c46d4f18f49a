"""Trackers of experiments: the records of a run's steps in Weights & Biases, MLflow or trackio."""

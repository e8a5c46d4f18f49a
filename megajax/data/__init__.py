"""Tokenizers, indexed datasets and the batches of a run."""

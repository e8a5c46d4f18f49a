"""Megatron-LM's checkpoints in: `python -m megajax.interop.megatron import SAVE`."""

"""megajax: Megatron-style training of large transformers in JAX, one jitted program per step."""

__version__ = "0.1.0"

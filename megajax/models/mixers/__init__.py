"""What mixes the tokens of a block, a file for each kind.

A mixer is an NNX module `Mixer(config, key, context)`, called as `Attention` in `attention.py` is: from y [b, split s, h] to
the same shape, and its entries in the block's cache, whose arrays the file's `cache_arrays` describes.
"""

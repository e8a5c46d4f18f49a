"""Models: the interface that the pipeline needs, Flax NNX modules behind it, and GPT and llama. No mesh, no collectives."""

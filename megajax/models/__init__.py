"""What is trained: Flax NNX modules, and the pure functions made from them. They hold no collectives, know no mesh."""

"""The devices and processes of a run, and the jax that drives them."""

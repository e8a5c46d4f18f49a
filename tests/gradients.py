"""Results and gradients of a function in one compiled program."""

import jax


def both_ways(of):
    """The jitted function of (gradient of the result, *arguments) that returns (result, *gradients of the arguments)."""

    def run(gradient, *arguments):
        result, pull = jax.vjp(of, *arguments)
        return result, *pull(gradient)

    return jax.jit(run)

"""Loops with a dynamic trip count: their results and counts, and what XLA hoists out of them."""

import jax
import jax.numpy as jnp
import pytest

from megajax.pipeline.loops import counted_loop, prevent_hoisting, run_one_of


@pytest.mark.parametrize(("count", "want"), [(0, 0), (1, 1), (3, 123)])
def test_a_counted_loop_runs_its_steps_and_adds_its_count(count, want):
    step = lambda index, zero, state: state * 10 + index + zero + 1  # noqa: E731
    iterations, state = jax.jit(lambda count: counted_loop(5, count, step, jnp.int32(0)))(count)
    assert (int(iterations), int(state)) == (5 + count, want)


@pytest.mark.parametrize("prevent", [False, True])
def test_prevent_hoisting_keeps_loop_invariant_work_in_the_loop(prevent):
    """Without it XLA runs a loop-invariant matmul before the loop, even if the trip count is zero."""

    def program(x, count):
        def step(_, zero, state):
            own = prevent_hoisting(zero, x) if prevent else x
            return state + own @ own

        return counted_loop(0, count, step, x)[1]

    text = jax.jit(program).lower(jnp.ones((64, 64)), 2).compile().as_text()
    assert "while/body/dot_general" in text
    before_the_loop = text[text.index("ENTRY ") :]
    assert ("while/body/dot_general" in before_the_loop) == (not prevent)


@pytest.mark.parametrize(("index", "want"), [(-1, 7), (0, 17), (2, 37), (3, 7)])
def test_one_branch_runs_or_none(index, want):
    branches = [lambda zero, state, n=n: state + zero + 10 * n for n in (1, 2, 3)]
    program = lambda index: run_one_of(5, index, branches, jnp.int32(7), always=False)  # noqa: E731
    iterations, state = jax.jit(program)(index)
    assert (int(iterations), int(state)) == (5 + (want != 7), want)


def test_a_branch_that_always_runs():
    branches = [lambda zero, state, n=n: state * n for n in (2, 3)]
    program = lambda index: run_one_of(0, index, branches, jnp.int32(7), always=True)  # noqa: E731
    assert [int(jax.jit(program)(index)[1]) for index in (0, 1)] == [14, 21]

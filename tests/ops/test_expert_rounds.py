"""Experts whose tokens travel in exchanges of a fixed size: nothing is dropped whatever the loads, and the sizes hold."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.estimate import collective_order
from megajax.models.interface import ModelContext
from megajax.models.moe import Experts, Router
from megajax.ops import expert_rounds
from megajax.ops.expert_choice import Choice
from megajax.ops.expert_group import ExpertGroup
from megajax.ops.expert_rounds import Rounds
from megajax.ops.grouped_matmul import INTERPRETED, XLA, GroupedMatmuls
from megajax.runtime.compat import compiled_text
from megajax.sharding.rules import default_rules
from tests import small

REPLICAS, TENSOR, SAMPLES, LENGTH, CHOICES, EXPERTS = 4, 2, 2, 16, 3, 8
CONFIG = dataclasses.replace(
    small.MODEL, hidden=8, heads=2, feedforward=6, activation="swiglu", experts=EXPERTS, experts_per_token=CHOICES
)
TOKENS = REPLICAS * SAMPLES, LENGTH
NAMES = "tokens", "weights", "up", "down"


def loads():
    """Choices [N b, s, k] by the name of their load; E is a choice that is dropped."""
    draw = np.random.default_rng(0)
    random = draw.random((*TOKENS, EXPERTS)).argsort(-1)[..., :CHOICES]
    one = np.broadcast_to([0, 1, 2], random.shape)  # experts 0 and 1 are one replica's
    found = {
        "random": random,
        "all tokens to one replica": np.broadcast_to([0, 1, EXPERTS], random.shape),
        "equal scores: the first experts": one,
        "one source of four overflows": np.where(np.arange(TOKENS[0])[:, None, None] < SAMPLES, one, random),
        "the second half of each sample overflows": np.where(np.arange(LENGTH)[:, None] < LENGTH // 2, random, 7 - one),
        "none": np.full_like(random, EXPERTS),
    }
    return {name: experts.astype(np.int32) for name, experts in found.items()}


def drawn():
    draw = np.random.default_rng(1)
    sizes = (*TOKENS, CONFIG.hidden), (*TOKENS, CHOICES), (EXPERTS, CONFIG.hidden, 2, 6), (EXPERTS, 6, CONFIG.hidden)
    values = [draw.normal(size=size).astype(np.float32) for size in sizes]
    return values, draw.normal(size=sizes[0]).astype(np.float32)


def in_rounds(kernel, arguments, over_tensor=False):
    """The program (tokens, weights, up, down, experts, gradient) -> (result, its gradients), of all replicas.

    `over_tensor`: each of their tensor ranks has whole experts.
    """
    members, axes = (REPLICAS * TENSOR, ("expert", "tensor")) if over_tensor else (REPLICAS, ("expert",))
    group = ExpertGroup(members, P(None, "tensor", None), TENSOR, "bucketed", axes=axes)
    rules = default_rules(expert_parallel=True, experts_over_tensor=over_tensor)
    matmuls = GroupedMatmuls(kernel, on_mesh=True, split=not over_tensor, over_groups=over_tensor)
    context = ModelContext(experts=group, constrain=rules.constrain, grouped_matmuls=matmuls)
    plain = ModelContext()
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(CONFIG, jax.random.key(0), plain)))
    whole = nnx.merge(graph, state)
    whole.constrain, whole.group, whole.matmuls = context.constrain, group, matmuls
    graph, state = nnx.split(whole)

    def local(tokens, weights, up, down, experts, gradient):
        def run(tokens, weights, up, down):
            given = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), nnx.to_pure_dict(state)) | {"up": up, "down": down}
            own = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(given)))
            return own(tokens, {"weights": weights, "experts": experts})

        out, transpose = jax.vjp(run, tokens, weights, up, down)
        return out, transpose(gradient)

    mesh = jax.make_mesh((1, REPLICAS, TENSOR), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    mapped = jax.jit(jax.shard_map(local, in_specs=P("expert"), out_specs=P("expert"), axis_names={"data", "expert"}))
    with jax.set_mesh(mesh):
        return mapped.lower(*arguments).compile()


@jax.jit
def dense(tokens, weights, up, down, experts, gradient):
    """Every expert for every token, masked."""

    def run(tokens, weights, up, down):
        shares = (jax.nn.one_hot(experts, EXPERTS) * weights[..., None]).sum(-2)
        gate, value = jnp.moveaxis(jnp.einsum("bsh,ehgf->bsegf", tokens, up), 3, 0)
        return jnp.einsum("bsef,efh,bse->bsh", jax.nn.silu(gate) * value, down, shares)

    out, transpose = jax.vjp(run, tokens, weights, up, down)
    return out, transpose(gradient)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [XLA, pytest.param(INTERPRETED, marks=pytest.mark.slow)], ids=["xla", "pallas"])
@pytest.mark.parametrize("over_tensor", [False, True], ids=["replicas", "ranks"])
@pytest.mark.parametrize("first", [1.0, pytest.param(1.5, marks=pytest.mark.slow)], ids=["all_to_all", "gather"])
def test_any_load_equals_the_dense_reference(monkeypatch, kernel, first, over_tensor):
    """And all members of a group run as many rounds: the program's collectives are consistent.

    With room for 1.5 times balanced loads all tokens of a replica have places on each other one, which gathers them then.
    """
    monkeypatch.setattr(expert_rounds, "FIRST", first)
    gathers = expert_rounds.Rounds.of(ExpertGroup(REPLICAS, shards=TENSOR), Choice(EXPERTS, CHOICES), SAMPLES * LENGTH)
    assert (gathers.room == gathers.tokens) == (first == 1.5) and not gathers.suffices  # of replicas
    monkeypatch.setattr(Router, "__call__", lambda self, y, microbatch: (microbatch["weights"], microbatch["experts"]))
    values, gradient = drawn()
    program = in_rounds(kernel, (*values, loads()["none"], gradient), over_tensor)
    verdict = collective_order.check(compiled_text(program))
    assert verdict.consistent and verdict.shared > 0, verdict
    for name, experts in loads().items():
        got, want = program(*values, experts, gradient), dense(*values, experts, gradient)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5, err_msg=name)
        for of, one, other in zip(NAMES, got[1], want[1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4, err_msg=f"{name}: {of}")


@pytest.mark.slow
def test_rounds_that_members_of_a_group_may_count_differently_are_found(monkeypatch):
    """Of their own part of what they have gathered."""
    monkeypatch.setattr(Router, "__call__", lambda self, y, microbatch: (microbatch["weights"], microbatch["experts"]))

    def of_own(self, numbered):
        own = lax.dynamic_slice_in_dim(numbered, SAMPLES * lax.axis_index("expert"), SAMPLES)
        return (own // (self.choice.count + 1)).max()

    monkeypatch.setattr(Rounds, "last", of_own)
    values, gradient = drawn()
    verdict = collective_order.check(compiled_text(in_rounds(XLA, (*values, loads()["none"], gradient))))
    assert not verdict.consistent and "which may differ between" in str(verdict)


# N, shards, T of a shard
SIZES = [
    (4, 1, Choice(8, 2), 12),
    (2, 2, Choice(8, 3), 5),
    (8, 1, Choice(8, 1), 6),
    (4, 2, Choice(8, 6), 9),
    (4, 1, Choice(8, 2, 4, 1), 11),  # the scores below do not keep to groups: their numbers only have less room
]


@functools.cache
def numbering(size):
    replicas, shards, choice, tokens = size
    rounds = Rounds.of(ExpertGroup(replicas, P(), shards), choice, tokens * shards)
    return rounds, jax.jit(rounds.numbered)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_each_choice_is_in_one_exchange_that_has_room_for_it(data):
    replicas, shards, choice, tokens = size = data.draw(st.sampled_from(SIZES))
    chosen, count = choice.chosen, choice.count
    rounds, number_of = numbering(size)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    favour = data.draw(st.sampled_from([0.0, 1.0, 8.0]))  # of the first experts
    scores = draw.random((1, shards * tokens, count)) - favour * np.linspace(0, -1, count)
    experts = scores.argsort(-1)[..., :chosen].astype(np.int32)
    experts = np.where(draw.random(experts.shape) < data.draw(st.sampled_from([0.0, 0.3, 1.0])), count, experts)
    code = np.asarray(number_of(experts))
    np.testing.assert_array_equal(code % (count + 1), experts)
    number = (code // (count + 1)).reshape(shards, tokens, chosen)
    owner = experts.reshape(number.shape) // (count // replicas)
    for shard, to in np.ndindex(shards, replicas):
        here = owner[shard] == to
        taken = (here & (number[shard] == 0)).sum(1)
        assert (taken > 0).sum() <= rounds.room and taken.sum() <= rounds.choices
        for later in range(1, number.max() + 1):
            assert (here & (number[shard] == later)).any(1).sum() <= rounds.later
        if taken.sum() < rounds.choices and (taken > 0).sum() < rounds.room:
            assert not (here & (number[shard] > 0)).any()
    assert (number[owner == replicas] == 0).all()
    assert number.max() <= -(-tokens // rounds.later)

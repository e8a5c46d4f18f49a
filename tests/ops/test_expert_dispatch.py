"""All-to-all of tokens to the replicas of their experts, against loops over all replicas' arrays in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.ops.expert_choice import Choice
from megajax.ops.expert_dispatch import all_to_all
from megajax.ops.expert_group import ExpertGroup

REPLICAS, TENSOR, SAMPLES, LENGTH, WIDTH, CHOICES, EXPERTS = 4, 2, 2, 6, 3, 3, 8
GROUP = ExpertGroup(REPLICAS, P(None, "tensor", None), TENSOR, "all_to_all")
ANY, OF_A_GROUP = Choice(EXPERTS, CHOICES), Choice(EXPERTS, CHOICES, groups=2)  # of a group: on two replicas at most
WHOLE = ExpertGroup(REPLICAS, P(), 1, "all_to_all")


def drawn_choices(choice):
    """Experts of [N b, s, k] tokens: each token's differ, none chooses the last replica's, and some are dropped."""
    draw = np.random.default_rng(1)
    shape = REPLICAS * SAMPLES, LENGTH
    any_of = EXPERTS - 2 if choice.groups == 1 else EXPERTS // choice.groups  # those of the first group, or nearly all
    chosen = np.stack([draw.permutation(any_of)[:CHOICES] for _ in range(np.prod(shape))]).reshape(*shape, -1)
    chosen[0] = [0, 1, 2]  # a sample that is sent to two replicas
    return np.where(draw.random(chosen.shape) < 0.2, EXPERTS, chosen).astype(np.int32)


def expected_places(chosen, x, shards, room):
    """Loops: the tokens [N, N, shards room, h] that each replica gets from each, and the rows of `chosen` with them."""
    here, part = EXPERTS // REPLICAS, LENGTH // shards
    tokens = np.zeros((REPLICAS, REPLICAS, shards, room, WIDTH), x.dtype)
    choices = np.full((REPLICAS, REPLICAS, shards, room, CHOICES), -1)
    for to in range(REPLICAS):
        for source in range(REPLICAS):
            for shard in range(shards):
                place = 0
                for sample in range(source * SAMPLES, (source + 1) * SAMPLES):
                    for token in range(shard * part, (shard + 1) * part):
                        if (chosen[sample, token] // here == to).any():
                            tokens[to, source, shard, place] = x[sample, token]
                            choices[to, source, shard, place] = chosen[sample, token]
                            place += 1
    return tokens.reshape(REPLICAS, REPLICAS, -1, WIDTH), choices.reshape(REPLICAS, -1, CHOICES)


def ragged_by_gathering(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` by its documentation, for the CPU, on which XLA has none; every row is looked at."""
    me = lax.axis_index(axis_name)
    everyone = lambda x: lax.all_gather(x, axis_name)  # noqa: E731
    sources, starts, sizes, places = map(everyone, (operand, input_offsets, send_sizes, output_offsets))
    row = jnp.arange(len(output))
    for source in range(len(recv_sizes)):
        at = row - places[source, me]
        found = jnp.take(sources[source], jnp.clip(starts[source, me] + at, 0, len(operand) - 1), axis=0)
        output = jnp.where(((at >= 0) & (at < recv_sizes[source]))[:, None], found, output)
        output = jnp.where((sizes[source, me] == recv_sizes[source]), output, jnp.nan)
    return output


@pytest.mark.parametrize(
    ("group", "most", "ragged", "choice"),
    [
        (GROUP, LENGTH, False, ANY),
        (GROUP, LENGTH, True, ANY),
        (WHOLE, 4, False, ANY),
        (GROUP, LENGTH, False, OF_A_GROUP),
        (GROUP, LENGTH, True, OF_A_GROUP),
    ],
)
def test_tokens_are_sent_where_they_chose_an_expert(monkeypatch, group, most, ragged, choice):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_by_gathering)
    group, draw, chosen = dataclasses.replace(group, ragged=ragged), np.random.default_rng(0), drawn_choices(choice)
    room = SAMPLES * min(LENGTH // group.shards, most)
    if most < LENGTH:  # of each sample, the first that any replica may take
        for sample, replica in np.ndindex(len(chosen), REPLICAS):
            of_replica = (chosen[sample] // (EXPERTS // REPLICAS) == replica).any(-1)
            chosen[sample, np.flatnonzero(of_replica)[most:]] = EXPERTS
    x = draw.normal(size=(*chosen.shape[:2], WIDTH)).astype(np.float32)
    places = (REPLICAS * REPLICAS, group.shards * room, WIDTH)
    back = draw.normal(size=places).astype(np.float32)

    def everything(chosen, x, back):
        exchange = all_to_all(group, lax.all_gather(chosen, "expert", tiled=True), choice, most)
        sent, send_transpose = jax.vjp(exchange.send, x)
        summed, collect_transpose = jax.vjp(exchange.collect, back)
        all_choices = lax.all_gather(chosen, "expert", tiled=True)
        return sent, *send_transpose(back), summed, *collect_transpose(x), exchange.choices(all_choices)

    mesh = jax.make_mesh((REPLICAS, TENSOR), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(everything, in_specs=P("expert"), out_specs=P("expert"), axis_names={"expert"})
        sent, sent_gradient, summed, summed_gradient, choices = map(np.asarray, jax.jit(mapped)(chosen, x, back))
    expected, expected_choices = expected_places(chosen, x, group.shards, room)
    np.testing.assert_array_equal(sent, expected.reshape(places))
    np.testing.assert_array_equal(summed_gradient, sent)
    known = expected_choices >= 0
    np.testing.assert_array_equal(choices.reshape(known.shape)[known], expected_choices[known])
    of_others = choices.reshape(known.shape)[~known].reshape(-1, CHOICES)
    assert of_others.size  # and none of them is of an expert of this replica
    replica = np.broadcast_to(np.arange(REPLICAS)[:, None, None], known.shape)[~known].reshape(-1, CHOICES)
    assert (of_others // (EXPERTS // REPLICAS) != replica).all()
    # Sums: the transpose of sending, by its inner product with any array, and token by token.
    np.testing.assert_array_equal(sent_gradient, summed)
    index, _ = expected_places(chosen, np.arange(1, x.size + 1).reshape(x.shape), group.shards, room)
    total = np.zeros(x.size + 1)
    np.add.at(total, index.reshape(-1), back.reshape(-1))
    np.testing.assert_allclose(summed, total[1:].reshape(x.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ragged", [False, True])
def test_tokens_are_sent_to_the_tensor_ranks_that_have_their_experts(monkeypatch, ragged):
    """Of each rank its part of the sequence, to any of the eight: each has one whole expert."""
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_by_gathering)
    members, part = REPLICAS * TENSOR, LENGTH // TENSOR
    room, chosen, draw = SAMPLES * part, drawn_choices(ANY), np.random.default_rng(0)
    group = ExpertGroup(members, P(None, "tensor", None), TENSOR, "all_to_all", ragged, axes=("expert", "tensor"))
    x = draw.normal(size=(*chosen.shape[:2], WIDTH)).astype(np.float32)
    back = draw.normal(size=(members, members, room, WIDTH)).astype(np.float32)

    def everything(chosen, x, back):
        everyones = group.of_members(lax.all_gather(chosen, "expert", tiled=True))
        exchange = all_to_all(group, everyones, ANY, LENGTH)
        sent, send_transpose = jax.vjp(exchange.send, x)
        summed, collect_transpose = jax.vjp(exchange.collect, back)
        return sent, *send_transpose(back), summed, *collect_transpose(x), exchange.choices(everyones)

    mesh = jax.make_mesh((REPLICAS, TENSOR), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(everything, in_specs=P("expert"), out_specs=P("expert"), axis_names={"expert"})
        sent, sent_gradient, summed, summed_gradient, choices = map(np.asarray, jax.jit(mapped)(chosen, x, back))
    expected, own, total = np.zeros_like(sent), np.full((members, members, room, CHOICES), -1), np.zeros_like(x)
    for to, source in np.ndindex(members, members):
        replica, rank = divmod(source, TENSOR)
        samples = range(replica * SAMPLES, (replica + 1) * SAMPLES)
        tokens = [(sample, token) for sample in samples for token in range(rank * part, (rank + 1) * part)]
        for place, of in enumerate(of for of in tokens if (chosen[of] == to).any()):  # expert `to` is member `to`'s
            expected[to, source, place], own[to, source, place] = x[of], chosen[of]
            total[of] += back[to, source, place]
    np.testing.assert_array_equal(sent, expected)
    np.testing.assert_array_equal(summed_gradient, sent)
    np.testing.assert_array_equal(sent_gradient, summed)
    np.testing.assert_allclose(summed, total, rtol=1e-6, atol=1e-6)
    choices = choices.reshape(own.shape)
    np.testing.assert_array_equal(choices[own >= 0], own[own >= 0])
    assert (choices != np.arange(members)[:, None, None, None]).all(-1)[(own < 0).all(-1)].all()

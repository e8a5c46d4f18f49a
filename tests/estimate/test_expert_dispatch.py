"""What replicas that split experts send each other, in bytes and seconds worked by hand, and which dispatch `auto` takes."""

import dataclasses

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate import model_costs
from megajax.estimate.expert_dispatch import (
    GATHER,
    dispatch_times,
    dispatches,
    expert_seconds,
    sent_bytes,
    sent_share,
    with_expert_dispatch,
)
from megajax.estimate.expert_kernels import HIDDEN_PASSES, INNER_PASSES
from megajax.estimate.gpus import find_gpu
from megajax.estimate.program_blocks import Blocks
from megajax.estimate.rates import NETWORK_HOP, NVLINK_HOP, NVLINK_SHARE, RAGGED_PEER, RAGGED_SHARE, START, rates_of
from megajax.estimate.step_time import step_time

H100 = find_gpu("h100-80gb")


def run_of(dispatch="auto", capacity=0.0, model="mixtral-8x7b", **parallel) -> RunConfig:
    model = dataclasses.replace(preset(model), sequence_length=4096, expert_capacity=capacity)
    layout = ParallelConfig(**{"data": 16, "expert": 8, "expert_dispatch": dispatch} | parallel)
    run = RunConfig(model, layout, TrainConfig(global_batch_size=64, precision="bf16"))
    run.validate()
    return run


@pytest.mark.parametrize(
    ("run", "share", "ragged"),
    [
        (run_of(), 2 / 8, True),  # two experts of eight, each on a replica of its own
        (run_of(expert=4), 1 - 6 / 8 * 5 / 7, True),  # any of two
        (run_of(model="qwen3-30b-a3b", expert=2), 1 - 1 / 2**8, True),  # nearly: eight of 128, of which 64 are there
        (run_of(capacity=1.25), 1.25 * 2 / 8, False),  # the places of one expert
        (run_of(capacity=1.25, tensor=2), 2 * 1.25 * 2 / 8, False),  # of each half of the sequence, as many
        (run_of(capacity=4.0), 2 / 8, True),  # as many as a sample has tokens
        (run_of(tensor=2, expert_tensor=1), 2 / 8, True),  # an expert on each of two ranks of four replicas
        (run_of(capacity=1.25, tensor=2, expert_tensor=1), 2 * 1.25 * 2 / 8, False),
    ],
)
def test_the_part_of_its_tokens_that_a_replica_sends_to_another_one(run, share, ragged):
    found = sent_share(model_costs(run.model).experts, run.parallel)
    assert found == (pytest.approx(share, rel=2e-3), ragged)


@pytest.mark.parametrize(
    ("model", "degree", "share"),
    [("mixtral-8x7b", 8, 1.5 * 2 / 8), ("qwen3-30b-a3b", 4, 1.0)],  # of the second, 0.90 by balanced routing
)
def test_buckets_that_hold_all_tokens_are_gathered(model, degree, share):
    run = run_of("bucketed", model=model, expert=degree)
    costs = model_costs(run.model)
    assert sent_share(costs.experts, run.parallel) == (pytest.approx(share), False)
    first = dispatches(costs, run.parallel, 2)[0]
    assert (first.kind == GATHER) == (share == 1)
    assert first.each == pytest.approx(share * 4096 * costs.hidden * 2 * (degree - 1))


def test_seconds_of_both_dispatches_by_hand():
    """Tokens of 4096 x 4096 elements. The group of eight is in a host, or in two: four and four."""
    tokens, rates = 2 * 4096 * 4096, rates_of(H100, "bf16")
    times = lambda *args, **fields: dispatch_times(  # noqa: E731
        model_costs(run_of(*args, **fields).model), run_of(*args, **fields).parallel, rates, 2
    )
    host, adapter = NVLINK_SHARE * 450e9, 0.8 * 50e9
    there, back = times("gather")
    assert there == pytest.approx(7 * tokens / host, rel=0.1) and back == pytest.approx(7 * tokens / host, rel=0.1)
    ragged = 7 * tokens / 4 / (RAGGED_SHARE * 450e9) + 8 * RAGGED_PEER
    assert times("all_to_all") == pytest.approx([ragged] * 2, rel=0.01)
    # Between hosts all four adapters send a part of the gathered tokens, but each replica its own tokens by one.
    apart = {"tensor": 2, "axis_order": ("pipe", "data", "tensor"), "sequence_parallel": False}
    there, back = times("gather", **apart)
    assert there == pytest.approx(7 * tokens / (4 * adapter), rel=0.1)
    assert back == pytest.approx(4 * tokens / adapter, rel=0.1)
    full = times("all_to_all", 1.0, **apart)
    assert full == pytest.approx([4 * tokens / 4 / adapter + START + NETWORK_HOP] * 2)
    assert times("gather", expert=1) == (0, 0)


def test_seconds_between_tensor_ranks_by_hand():
    """Eight devices send half of 4096 x 4096 elements: two ranks of four replicas, in a host, or four of each in two."""
    part, rates = 4096 * 4096, rates_of(H100, "bf16")

    def times(**fields):
        run = run_of("gather", tensor=2, expert_tensor=1, **fields)
        return dispatch_times(model_costs(run.model), run.parallel, rates, 2)

    host, adapter = NVLINK_SHARE * 450e9, 0.8 * 50e9
    for order in ("data", "pipe", "tensor"), ("pipe", "data", "tensor"):
        assert times(axis_order=order) == pytest.approx([7 * part / host] * 2, rel=0.1)
    there, back = times(axis_order=("tensor", "pipe", "data"))  # neighbours on tensor are 16 devices apart
    assert there == pytest.approx(7 * part / (4 * adapter), rel=0.1)
    assert back == pytest.approx(4 * part / adapter, rel=0.1)
    there, back = times(pipe=2, axis_order=("data", "pipe", "tensor"))  # and on data four
    assert there == pytest.approx(7 * part / (4 * adapter), rel=0.1)
    there, back = times(expert=2, axis_order=("data", "pipe", "tensor"))  # of one replica
    assert there == pytest.approx(part / host + START + NVLINK_HOP)


def test_blocks_of_tensor_ranks_with_experts_of_their_own():
    """Against half of each expert: as many FLOPs and parameters; half as many rows of the hidden size, and none to sum."""
    split, whole = run_of("gather", tensor=2, expert=4), run_of("gather", tensor=2, expert_tensor=1)
    before, after = (Blocks(one, H100) for one in (split, whole))
    assert after.held == before.held and after.kept == before.kept
    assert (before.rows, after.rows, before.routed, after.routed) == (4096, 4096, 4096, 2048)
    *dense, router, into, out = after._products
    assert (into.inputs, into.outputs, out.inputs, out.outputs) == (4096, 2 * 2 * 14336, 2 * 14336, 4096)
    assert (router.inputs, router.outputs) == (4096, 8 / 2) and dense == before._products[: len(dense)]
    assert after.room == 8 * 1 / 2 and before.room == 4 * 2 / 2  # rows for each one that balanced routing gives
    # hidden elements of rows, those before and after the activation, and those of tokens that arrive, read and summed
    inner = INNER_PASSES[0] * 2 * 3 * 14336
    passes = HIDDEN_PASSES[0] * 2 * 4096
    assert after.expert_rows(0) == 2048 * 2 * (4 * (passes + inner) + 2 * 8 * 4096 + 8 * 4096)
    assert after.over_tensor(after.sends.forward)[2] == 0 < before.over_tensor(before.sends.forward)[2]
    assert after.forward.total < before.forward.total


def test_tokens_in_8_bits_by_hand():
    """Three of five exchanges: tokens, tokens again, and gradients of results; 1 + 1/128 bytes of an element, not 2."""
    for dispatch, kinds in (("gather", (GATHER, "all-to-all")), ("bucketed", ("all-to-all",) * 2)):
        run = run_of(dispatch)
        costs = model_costs(run.model)
        eight = dataclasses.replace(run, train=dataclasses.replace(run.train, expert_dispatch_dtype="fp8"))
        assert sent_bytes(run) == 2 and sent_bytes(eight) == 1 + 1 / 128
        there, back, *_ = dispatches(costs, run.parallel, 2, sent_bytes(eight))
        plain = dispatches(costs, run.parallel, 2)[0].each
        assert (there.kind, back.kind) == kinds
        assert (there.forward, there.backward, back.forward, back.backward) == (1, 2, 1, 1)
        assert (there.each, back.each) == pytest.approx((plain * (1 + 1 / 128) / 2, plain))
        assert step_time(eight, H100).total < step_time(run, H100).total


def test_experts_matmuls_in_8_bits_by_hand():
    """Their operands, of two rows of a token and of one expert, are read in 16 bits and written in 8, or rounded.

    Of 4096 tokens' rows of 4096 elements and of 14,336: in a backward of the gradients of 4096 and of 28,672.
    """
    run = run_of("bucketed")
    eight = dataclasses.replace(run, train=dataclasses.replace(run.train, expert_matmul_dtype="fp8"))
    weights, rows = 3 * 4096 * 14336, (2 * 4096 + 2 * 14336, 2 * 4096 + 2 * 28672)
    for gpu, each, faster in ((H100, 3, True), (find_gpu("b200"), 6, False)):
        plain, found = (Blocks(one, gpu) for one in (run, eight))
        for of, elements in zip(("forward", "input"), rows, strict=True):
            before, after = getattr(plain, of), getattr(found, of)
            moved = each * (4096 * elements + weights) / plain.rates.memory
            assert after.traffic - before.traffic == pytest.approx(moved)
            assert (after.matmul < 0.75 * before.matmul) if faster else (after.matmul == before.matmul)
        assert found.weight.matmul == plain.weight.matmul
        assert (step_time(eight, gpu).total < step_time(run, gpu).total) == faster


@pytest.mark.parametrize(
    ("run", "chosen"),
    [
        (run_of(), "gather"),  # XLA's ragged all-to-all is slow within a host
        (run_of(capacity=1.25, tensor=8, sequence_parallel=False), "all_to_all"),  # between hosts
        (run_of(capacity=1.25), "all_to_all"),  # places for 5/16 of the tokens
        (run_of(capacity=4.0), "gather"),
        (run_of(expert=1, tensor=8), "gather"),
        (run_of("all_to_all"), "all_to_all"),
        (run_of("gather", tensor=8), "gather"),
    ],
)
def test_auto_takes_what_is_faster(run, chosen):
    resolved = with_expert_dispatch(run, H100)
    assert resolved.parallel == dataclasses.replace(run.parallel, expert_dispatch=chosen)
    others = (
        dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, expert_dispatch=name))
        for name in ("gather", "all_to_all")
    )
    if run.parallel.expert_dispatch == "auto":
        assert step_time(resolved, H100).total == min(step_time(one, H100).total for one in others)


@pytest.mark.parametrize("fields", [{}, {"tensor": 2}, {"tensor": 8}, {"expert": 4}, {"expert": 2, "tensor": 4}])
@pytest.mark.parametrize("capacity", [0.0, 1.0, 1.25, 4.0])
def test_auto_is_never_the_ragged_all_to_all(capacity, fields):
    run = run_of(capacity=capacity, **fields)
    if sent_share(model_costs(run.model).experts, run.parallel)[1]:
        assert with_expert_dispatch(run, H100).parallel.expert_dispatch == "gather"


def test_between_hosts_the_ragged_all_to_all_would_be_faster():
    """The price of not taking it."""
    times = {name: step_time(run_of(name, tensor=8), H100).total for name in ("gather", "all_to_all")}
    assert times["all_to_all"] < times["gather"] == step_time(with_expert_dispatch(run_of(tensor=8), H100), H100).total


@pytest.mark.parametrize(
    ("degree", "pieces", "merged", "backward"),
    [
        (8, {"gather": 371, "back": 351, "choices": 35, "weights": 14}, 480, 730),
        (4, {"gather": 164, "back": 157, "choices": 20, "weights": 13}, 270, 220),
    ],
)
def test_what_programs_leave_exposed_of_a_dispatch(degree, pieces, merged, backward):
    """Microseconds of the collectives of Qwen3-30B-A3B's blocks in programs compiled for H100s, of 8 replicas on one stage
    and of 4 on two, and of those what overlapped no kernel in a merged tick's block and in a backward's.
    """
    run = run_of("gather", model="qwen3-30b-a3b", data=8, expert=degree)
    sent = expert_seconds(model_costs(run.model), run.parallel, rates_of(H100, "bf16"), 2)
    forward = pieces["gather"] + pieces["back"] + 2 * pieces["choices"]
    assert sent.forward == pytest.approx(1e-6 * forward, rel=0.01)
    assert sent.backward == pytest.approx(1e-6 * (forward + pieces["gather"] + pieces["weights"]), rel=0.01)
    exposed = sent.exposed
    assert exposed.forward == sent.forward
    assert exposed.merged == pytest.approx(1e-6 * merged, rel=0.1)
    assert 0 <= exposed.backward - 1e-6 * backward < 1e-6 * pieces["back"]  # XLA hides a part of an exchange more
    assert exposed.merged < exposed.backward < sent.backward
    full = run.with_layout(recompute="full")
    again = expert_seconds(model_costs(full.model), full.parallel, rates_of(H100, "bf16"), 2).exposed
    if degree == 8:
        assert (again.backward, again.merged) == pytest.approx((1.10e-3, 1.44e-3), rel=0.13)


def test_what_deepseek_v3_leaves_exposed_of_its_all_to_alls():
    """On 1,024 H100s, 128 microbatches of 58 sparse layers on 16 stages: 0.38 of 2.10 s (without those of the head)."""
    run = run_of("bucketed", model="deepseek-v3", data=8, recompute="full")
    costs, rates, blocks = model_costs(run.model), rates_of(H100, "bf16"), 128 * 58 / 16
    tokens = sum(
        (one.forward + one.backward) * one.seconds(run.parallel, rates)
        for one in dispatches(costs, run.parallel, 2)
        if one.kind != GATHER
    )
    assert blocks * tokens == pytest.approx(2.10, rel=0.02)
    assert blocks * expert_seconds(costs, run.parallel, rates, 2).exposed.merged == pytest.approx(0.38, rel=0.15)


def test_what_takes_longer_than_all_kernels_beside_it_is_exposed():
    """Over slow adapters a merged tick's exchanges outlast all of its matmuls."""
    fast, slow = (dataclasses.replace(H100, network_bandwidth=bandwidth) for bandwidth in (5e10, 1e8))
    run = run_of("gather", model="qwen3-30b-a3b", data=16, expert=16)
    quick, long = (Blocks(run, gpu) for gpu in (fast, slow))
    assert quick.merged.expert == pytest.approx(quick.dispatched.exposed.merged)
    whole = long.dispatched.forward + long.dispatched.backward
    assert long.merged.expert > 0.9 * whole > long.dispatched.exposed.merged

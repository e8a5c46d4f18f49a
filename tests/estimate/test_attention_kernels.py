"""Attention's share of a block's time, counted by hand: round a ring, and by XLA's own kernels."""

import dataclasses

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.communication import context_elements, exchanged_elements
from megajax.estimate.context_exchange import with_context_exchange
from megajax.estimate.gpus import find_gpu
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.program_account import rates_of_run
from megajax.estimate.program_time import Program
from megajax.estimate.step_time import step_time

H100 = find_gpu("h100-80gb")


def blocks(model, **layout):
    run = RunConfig(model, ParallelConfig(**layout), TrainConfig(global_batch_size=layout.get("microbatch_size", 1)))
    return Program(run, H100).kinds[0][0]


def test_a_kernel_of_a_ring_has_the_keys_of_one_rank():
    """As many FLOPs as without the ring, a quarter on each rank, at the rate of an eighth of the sequence's keys."""
    model = dataclasses.replace(preset("llama3.2-1b"), sequence_length=65536)
    ring = blocks(model, context=4, context_exchange="ring", attention="cudnn")
    flops = 4 * 32 * 64 * 65536 * 65537 / 2 / 4
    for backward, factor in ((False, 1), (True, 2.5)):
        seconds = ring.attention[backward].attention
        assert seconds == pytest.approx(factor * flops / ring.rates.attention_rate(backward, 8192, 64), rel=1e-4)
    # Three steps copy queries, and keys and values, which are a quarter of the queries each.
    queries = 16384 * 2048 * 2
    assert ring.between_ranks(0).traffic == pytest.approx((3 * 3 + 2 + 3 * 4 / 4) * queries / ring.rates.memory)
    # Of six sends one is hidden, and what the queries' rotation takes; of a backward's, all.
    send = ring.send(queries / 4, "data", 4)
    assert ring.around(0) == pytest.approx(5 * send - 2 * queries / ring.rates.memory) and ring.around(1) == 0


def test_values_of_another_size_cost_less_where_the_kernel_has_it():
    """DeepSeek-V3, queries and keys of 192 and values of 128: cuDNN has both, tokamax gets zeros up to 192."""
    model, pairs = preset("deepseek-v3"), 128 * 4096 * 4097 / 2
    model = dataclasses.replace(model, sequence_length=4096)
    for kernel, forward, backward in (("cudnn", 192 + 128, 3 * 192 + 2 * 128), ("tokamax", 2 * 192, 7 * 192)):
        found = blocks(model, attention=kernel)
        for direction, width in enumerate((forward, backward)):
            rate = found.rates.attention_rate(bool(direction), 4097 / 2, 192)
            assert found.attention[direction].attention == pytest.approx(2 * pairs * width / rate, rel=1e-3)


def test_ranks_of_a_sample_exchange_what_latent_attention_has():
    """Queries and their results have 128 heads of 192 and 128 elements, keys and values as many: without zeros."""
    model = dataclasses.replace(preset("deepseek-v3"), sequence_length=8192)
    run = RunConfig(model, ParallelConfig(context=4, attention="cudnn"), TrainConfig(global_batch_size=1))
    queries, keys = exchanged_elements(run)
    assert 2 * queries == 2 * keys == 2048 * 128 * (192 + 128) and context_elements(run) == keys


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("mode", "passes", "masks", "products"),
    [("none", (4, 4, 0), (3, 4, 0), (2, 4, 0)), ("selective", (4, 4, 4), (0, 2, 0), (2, 4, 1))],
)
def test_xlas_attention_moves_scores(dropout, mode, passes, masks, products):
    """GPT-2's heads on 8 samples: passes over the scores in 16 bits, masks of a byte, and copies of queries and others."""
    model = dataclasses.replace(preset("gpt2"), dropout=dropout)
    found = blocks(model, microbatch_size=8, attention="xla", recompute=mode)
    scores, arrays = 8 * 12 * 1024 * 1024, 3 * 8 * 1024 * 768 * 2
    one = max((2 * scores + 2 * arrays / 3) / found.rates.memory, found.rates.product(2 * scores * 64, 2 * scores, 0))
    for work, often, bytes_of_mask, matmuls, copies in zip(
        found.attention, passes, masks, products, (10 / 3, 8, 0) if mode == "selective" else (0, 0, 0), strict=True
    ):
        moved = often * 2 * scores + (dropout > 0) * bytes_of_mask * scores + copies * arrays
        assert work.traffic == pytest.approx(moved / found.rates.memory)
        assert work.matmul == pytest.approx(matmuls * one)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("exchange", "part"), [("ring", (1 + 3 / 2) / 4), ("all_to_all", 1)])
def test_xlas_attention_of_ranks_that_share_samples(exchange, part, dropout):
    """GPT-2's heads, scores in fp32: on each of four ranks a quarter, of which a ring skips what the causal mask hides."""
    model = dataclasses.replace(preset("gpt2"), dropout=dropout, sequence_length=8192)
    found = blocks(model, context=4, context_exchange=exchange, attention="xla", recompute="selective")
    scores = 12 * 8192 * 2048 * part
    flops, rates = 2 * scores * 64, found.rates
    writes, reads = rates.product(flops, 4 * scores, 4 * scores), rates.product(flops, 0, 2 * scores)
    forward, backward, again = found.attention
    assert forward.matmul == pytest.approx(writes + reads) and again.total == 0
    assert forward.traffic == pytest.approx((3 * 4 + 2) * scores / rates.memory)
    assert backward.matmul == pytest.approx(2 * writes + 3 * reads)  # scores, probabilities' gradient; three gradients
    assert backward.traffic == pytest.approx((2 * 4 + 2 * 2 + 2 * (dropout > 0)) * scores / rates.memory)


# gpt2-xl of width 1,536 and 24 heads, 8,192 tokens, pipe 4, context 2: GB and seconds of python -m megajax.plan.dryrun
COMPILED = {("ring", 0.1): (20.59, 3.008), ("all_to_all", 0.1): (25.80, 3.769), ("all_to_all", 0.0): (24.97, 3.630)}


@pytest.mark.parametrize(("exchange", "dropout"), COMPILED)
def test_memory_and_time_of_xlas_attention_with_context(exchange, dropout):
    model = dataclasses.replace(preset("gpt2-xl"), hidden=1536, heads=24, sequence_length=8192, dropout=dropout)
    layout = ParallelConfig(pipe=4, context=2, context_exchange=exchange, attention="xla", chunks=2)
    run, (peak, seconds) = RunConfig(model, layout, TrainConfig(global_batch_size=16)), COMPILED[exchange, dropout]
    assert sum(bytes_per_device(run).values()) / 1e9 == pytest.approx(peak, rel=0.03)
    assert step_time(run, H100).total == pytest.approx(seconds, rel=0.05)
    assert with_context_exchange(run.with_layout(context_exchange="auto"), H100).parallel.context_exchange == "ring"


def test_kernels_of_layers_with_windows_compute_what_these_leave():
    """gpt-oss: in every other layer a token sees 128, itself counted half. The time is that of both layers' kernels.

    A program does not say so of tokamax's kernel and of megajax's backward, whose tiles the windows' first keys decide.
    """
    model = dataclasses.replace(preset("gpt-oss-120b"), sequence_length=4096, layers=2)
    run = RunConfig(model, ParallelConfig(attention="tokamax"), TrainConfig(global_batch_size=1))
    full, windowed = 4096 * 4096 / 2, 128 * (4096 - 128 / 2)
    rates = rates_of_run(run, H100)
    assert rates.attention_part == (full + windowed) / 2 / 4096**2 == pytest.approx(0.2654, abs=1e-4)
    seconds = rates.attention_part * 4096**2 / rates.attention_rate(False, rates.attention_part * 4096, 64)
    each = [scores / rates.attention_rate(False, scores / 4096, 64) for scores in (full, windowed)]
    assert seconds == pytest.approx(sum(each) / 2)
    block = Program(run, H100).kinds[0][0]
    assert block.attention[0].attention == pytest.approx(seconds * 4 * 64 * 64)  # heads, their elements

    whole = dataclasses.replace(run, model=preset("llama3.2-1b"))
    assert rates_of_run(whole, H100).attention_part == 0.5
    assert rates_of_run(dataclasses.replace(run, model=preset("bert-336m")), H100).attention_part == 1.0

"""The memory model against the schedules' tables, the model's own parameters, closed forms, and compiled programs."""

import dataclasses
import math
import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from benchmarks import compiled
from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.parallel import MESH_AXES as AXES
from megajax.estimate.kept import kept_of_block
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.parameters import Sharding
from megajax.models.context import model_rules, model_shapes
from megajax.models.transformer_costs import transformer_costs
from megajax.pipeline.parameters import initial_params, parameter_specs
from megajax.pipeline.program import StepProgram, counted_slots
from megajax.schedules.registry import SPECS, check_sizes, find
from tests.small import SPARSE


def run_of(name="gpt3-175b", batch=64, precision="bf16", **parallel) -> RunConfig:
    return RunConfig(
        preset(name), ParallelConfig(**parallel), TrainConfig(global_batch_size=batch, precision=precision)
    )


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.slots and spec.drains])
def test_closed_form_slots_are_those_counted_in_the_tables(name):
    spec, checked = find(name), 0
    for pipe in (1, 2, 3, 4, 6, 8):
        for chunks in {"one": (1,), "two": (2,), "even": (2, 4), "any": (1, 2, 3)}[spec.chunks]:
            for microbatches in {1, 2, 3, pipe, pipe + 1, 2 * pipe - 2, 2 * pipe - 1, 2 * pipe, 4 * pipe}:
                if (
                    pipe == 1 < chunks
                    or not microbatches
                    or check_sizes(name, stages=pipe, microbatches=microbatches, chunks=chunks)
                ):
                    continue
                run = run_of("tiny", microbatches, pipe=pipe, chunks=chunks, schedule=name)
                arguments = StepProgram.of(run).schedule_arguments
                closed = spec.slots(**arguments)
                assert closed in (None, counted_slots(spec, **arguments)), (pipe, chunks, microbatches)
                checked += closed is not None
    assert checked >= 10


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt3-175b", (2, 8, 8)),
        ("gpt2", (1, 4, 2)),
        ("llama2-7b", (4, 2, 4)),
        ("tiny", (8, 1, 1)),
        ("llama3.1-405b", (1, 16, 8)),  # 126 layers in 128 slots
    ],
)
def test_weights_are_the_bytes_on_a_device(name, mesh):
    """Shapes and shardings of the program, by jax.eval_shape."""
    run = run_of(name, 8 * mesh[0], data=mesh[0], pipe=mesh[1], tensor=mesh[2])
    abstract = AbstractMesh(mesh, AXES, axis_types=(AxisType.Auto,) * 3)
    model = model_shapes(run)
    shapes = jax.eval_shape(lambda key: initial_params(model, run.parallel, key), jax.random.key(0))
    specs = parameter_specs(model, run.parallel, model_rules(run))
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(specs.stored), strict=True)
    local = sum(4 * math.prod(NamedSharding(abstract, spec).shard_shape(leaf.shape)) for leaf, spec in leaves)
    assert bytes_per_device(run)["weights"] == local
    assert bytes_per_device(run)["optimizer"] == 2 * local


def test_zero_has_megatrons_bytes_a_parameter():
    """18 bytes, 6 + 12/d with the optimizer's state split (Megatron-LM's docs), 18/d with all of it."""
    run = run_of(batch=512, data=8, pipe=8, tensor=8, chunks=3)
    parameters = bytes_per_device(run)["weights"] / 4
    state = ("weights", "optimizer", "gradients", "16-bit weights")
    of = lambda level: sum(bytes_per_device(run, Sharding(level, True))[part] for part in state) / parameters  # noqa: E731
    assert of(0) == 18
    assert of(1) == pytest.approx(6 + 12 / 8, rel=1e-6)
    assert 18 / 8 < of(3) < 18 / 8 + 0.4  # and two gathered blocks


def test_vocabulary_over_pipe_shards_the_table():
    run = run_of(pipe=8, tensor=8, chunks=3)
    whole = bytes_per_device(run, Sharding())["weights"]
    assert whole - bytes_per_device(run)["weights"] == 4 * 51200 * 12288 * (1 / 8 - 1 / 64)


def test_stash_is_2205s_interleaving_factor():
    """Section 4.2.3: L (1 + (p-1)/(pv)) layers, and a chunk of four, whose backward runs one tick later; 1F1B's L."""
    run = run_of(pipe=8, tensor=8, chunks=3)
    layer = transformer_costs(run.model).kept_bytes("selective", samples=1, tensor=8)
    layers = bytes_per_device(run)["stash"] / layer
    assert layers == 96 * (1 + (8 - 1) / (8 * 3)) + 4
    strict = run_of(pipe=8, tensor=8, schedule="1f1b")
    assert bytes_per_device(strict)["stash"] == 96 * layer  # "L layers' worth, for any p"


def test_memory_does_not_grow_with_microbatches():
    few, many = (bytes_per_device(run_of(batch=batch, pipe=8, tensor=8, chunks=3)) for batch in (16, 512))
    assert few == many


def test_compiled_programs_agree_within_five_percent():
    """XLA's own peaks for H100s (`python -m benchmarks.compiled memory`); held out: runs that no term was read from."""
    rows = [row for (kind, _), rows in compiled.read().items() for row in rows if kind.startswith("memory")]
    assert len(rows) >= 60 and sum(row["set"] == "memory, held out" for row in rows) >= 5
    assert {"gpt3-175b", "megatron-529.6b", "megatron-1008b"} <= {row["run"]["model"]["name"] for row in rows}
    for row in rows:
        found = compiled.Comparison(row)
        parts = found.bytes
        assert abs(found.peak_error) < 0.05, row["name"]
        # ZeRO shards no array that replicas do not divide
        assert parts["weights"] == pytest.approx(row["arguments"]["weights"], rel=1e-4)
        assert parts["optimizer"] == pytest.approx(row["arguments"]["optimizer"], rel=1e-4)


@pytest.mark.parametrize(("mode", "scores"), [("none", 1), ("selective", 0), ("full", 0)])
def test_cudnns_attention_keeps_no_scores(mode, scores):
    """2205.05198 table 2: the softmax's output is 2as^2b/t bytes a layer; cuDNN keeps one fp32 number for each query."""
    fused, plain = (
        bytes_per_device(run_of(pipe=8, tensor=8, schedule="1f1b", recompute=mode, attention=kernel))
        for kernel in ("cudnn", "xla")
    )
    layers, heads, tokens = 8 * 96 // 8, 96, 2048  # p microbatches of a rank's layers
    statistics = 4 * heads * tokens / 8 if mode != "full" else 0
    assert plain["stash"] - fused["stash"] == layers * (scores * 2 * heads * tokens**2 / 8 - statistics)
    assert fused["copies"] == 0
    assert fused["workspace"] < plain["workspace"]
    same = ("weights", "optimizer", "gradients", "16-bit weights", "inboxes")
    assert all(fused[part] == plain[part] for part in same)


def test_the_workspace_is_a_blocks_or_the_heads():
    """Llama 3 8B, 8,192 tokens on two tensor ranks, by hand, all in bf16.

    A merged tick's block: twice what is inside its matmuls (queries, keys and values 6,144; both halves of the MLP 28,672;
    attention's output 4,096 and the activation 14,336), five gathered arrays of width 4,096 and six of half the tokens.
    The head, with its 128,256 columns over tensor: logits and their gradient, and three arrays of width 4,096.
    """
    sizes = {"pipe": 4, "tensor": 2, "chunks": 2, "attention": "cudnn"}
    over_pipe, over_tensor = (
        bytes_per_device(run_of("llama3-8b", vocab_parallel=axis, **sizes))["workspace"] for axis in ("pipe", "tensor")
    )
    inner = (6144 + 28672 + 4096 + 14336) // 2
    assert over_pipe == 2 * 8192 * (2 * inner + 5 * 4096 + 6 * 2048)
    assert over_tensor == 2 * 8192 * (2 * 128256 // 2 + 3 * 4096)
    mixed = bytes_per_device(run_of("llama3-8b", **sizes | {"schedule": "1f1b", "chunks": 1}))["workspace"]
    assert mixed == 2 * 8192 * (2 * inner + 2 * 4096)  # a backward alone


def test_zero_3_keeps_whole_gradients_of_the_tables():
    """Each of 4 replicas has a quarter of the blocks' gradients, and all of those of the tables and of the last norm."""
    run = run_of("llama3-8b", data=4, tensor=2, zero=3, attention="cudnn")
    costs = transformer_costs(run.model)
    blocks = 4 * 32 * costs.block.on_device(2) // 4
    tables = 4 * (2 * 128256 // 2 * 4096 + 4096)
    assert bytes_per_device(run)["gradients"] == pytest.approx(blocks + tables, rel=1e-6)


def test_recompute_none_keeps_what_matmuls_read_gathered():
    """Two norms' outputs of 2,048 tokens, 5,120 wide, whole on four tensor ranks; the other values are split."""
    for tensor, more in ((1, 0), (4, 3 / 4)):
        parallel = {"pipe": 2, "tensor": tensor, "schedule": "1f1b", "recompute": "none", "attention": "cudnn"}
        run = run_of("gpt3-13b", **parallel)
        block = transformer_costs(run.model).kept_bytes("none", samples=1, tensor=tensor, fused_attention=True)
        assert kept_of_block(run, 2) - block == 2 * more * 2048 * 5120 * 2


@pytest.mark.parametrize(
    ("name", "layers", "compiled", "fields"),
    [
        ("llama3.2-1b", 4, 10811.3e6, {"context": 4, "data": 2}),
        ("qwen3-0.6b", 8, 10438.8e6, {"context": 4, "data": 2}),
    ],
)
def test_blocks_without_a_loop_keep_the_context_in_two_layouts_and_queries_before_their_norm(
    name, layers, compiled, fields
):
    """Compiled for H100s: llama3.2-1b has no norm of queries and keys, qwen3-0.6b has."""
    model = dataclasses.replace(preset(name), layers=layers, sequence_length=32768)
    parallel = ParallelConfig(zero=1, attention="cudnn", context_exchange="all_to_all", **fields)
    run = RunConfig(model, parallel, TrainConfig(global_batch_size=8, precision="bf16"))
    assert sum(bytes_per_device(run).values()) == pytest.approx(compiled, rel=0.005)


def test_fp8_keeps_a_second_copy_of_the_blocks_weights():
    run = run_of("gpt3-13b", pipe=4, tensor=4, attention="cudnn")
    fp8 = dataclasses.replace(run, train=dataclasses.replace(run.train, matmul_dtype="fp8"))
    plain, more = (bytes_per_device(one) for one in (run, fp8))
    assert more["16-bit weights"] - plain["16-bit weights"] == 2 * 10 * transformer_costs(run.model).block.on_device(4)


def test_nothing_of_the_stash_is_stored_twice_in_fp8():
    """Compiled for H100s (`python -m benchmarks.compiled memory`): 40.67 GB with the gates transposed before each loop."""
    run = run_of("llama3-8b", 32, pipe=4, tensor=2, schedule="1f1b", attention="cudnn")
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, matmul_dtype="fp8"))
    assert sum(bytes_per_device(run).values()) == pytest.approx(33.17e9, rel=0.005)


@pytest.mark.parametrize("tensor", [4, 8])
def test_a_copy_of_a_head_of_keys_is_kept_by_each_rank(tensor):
    """Llama 3 8B has 32 heads of queries and 8 of keys, of 128 elements; with two of keys, ranks share them."""
    run = run_of("llama3-8b", tensor=tensor, attention="cudnn", schedule="1f1b", pipe=4)
    few = dataclasses.replace(run, model=dataclasses.replace(run.model, kv_heads=2))
    own = dataclasses.replace(run, model=dataclasses.replace(run.model, kv_heads=tensor))
    assert bytes_per_device(few)["stash"] == bytes_per_device(own)["stash"]


@pytest.mark.parametrize(("name", "samples", "compiled"), [("qwen2.5-1.5b", 1, 5.22), ("llama3.2-1b", 4, 12.05)])
def test_one_microbatch_allocates_gradients_when_logits_are_no_longer_needed(name, samples, compiled):
    """As compiled for RTX 4090s: two logits' arrays and the 16-bit table are there before the sums of gradients are."""
    run = run_of(name, 32 * samples, data=32, zero=3, microbatch_size=samples, attention="cudnn")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, sequence_length=2048))
    parts = bytes_per_device(run)
    assert sum(parts.values()) == pytest.approx(compiled * 1e9, rel=0.02)
    rows = 2048 * samples
    head = 2 * 2 * rows * run.model.vocabulary + 3 * 2 * rows * run.model.hidden
    assert parts["gradients"] + parts["workspace"] == pytest.approx(head, rel=0.01)
    more = dataclasses.replace(run, train=dataclasses.replace(run.train, global_batch_size=64 * samples))
    assert bytes_per_device(more)["workspace"] == pytest.approx(head, rel=0.01)  # beside the gradients


def test_two_gradients_of_one_shape_are_swapped_by_a_copy():
    """GPT-3 13B on four tensor ranks: [5120, 20480 / 4] and [20480 / 4, 5120], in fp32, of the 20 blocks of a rank."""
    parts = lambda **sizes: bytes_per_device(run_of("gpt3-13b", 256, attention="cudnn", **sizes))  # noqa: E731
    of = lambda **sizes: parts(**sizes)["copies"]  # noqa: E731
    for sizes in ({"chunks": 2}, {"chunks": 2, "data": 4}, {"schedule": "eager_1f1b"}):
        found = parts(pipe=2, tensor=4, **sizes)
        assert found["copies"] + found["workspace"] == 4 * 20 * 5120 * 5120  # a block's memory is free then
    assert of(pipe=4, tensor=4, schedule="eager_1f1b", data=4) == of(pipe=4, tensor=4, chunks=2, data=4) == 0
    assert (
        of(pipe=2, tensor=8, chunks=2) == of(pipe=4, tensor=4, schedule="zb_h1") == of(pipe=20, tensor=4, chunks=2) == 0
    )


def test_zero_1_copies_all_gradients_of_uneven_stages():
    """With full recomputation there is little else to keep: 405B's 126 layers in 128 slots take twice their gradients."""
    parallel = {"data": 128, "pipe": 8, "tensor": 8, "chunks": 8, "zero": 1, "recompute": "full", "attention": "cudnn"}
    uneven = run_of("llama3.1-405b", 2048, **parallel)
    even = dataclasses.replace(uneven, model=dataclasses.replace(uneven.model, layers=128))
    parts, others = bytes_per_device(uneven), bytes_per_device(even)
    assert sum(parts.values()) == parts["weights"] + parts["optimizer"] + 2 * parts["gradients"]
    assert others["gradients"] == parts["gradients"] and others["workspace"] < parts["workspace"]


def test_context_ranks_split_a_samples_tokens():
    """Twice the tokens on twice the context ranks: the same stash, and no scores kept."""
    once = run_of("llama2-7b", 16, pipe=4, tensor=2, chunks=2, attention="cudnn")
    model = dataclasses.replace(once.model, sequence_length=2 * once.model.sequence_length)
    twice = RunConfig(model, dataclasses.replace(once.parallel, context=2), once.train)
    of = lambda run: bytes_per_device(run, slots=StepProgram.of(run).schedule_slots)  # noqa: E731  (rings merge no ticks)
    for part in ("stash", "inboxes", "weights"):
        assert of(twice)[part] == of(once)[part]
    ring = RunConfig(model, dataclasses.replace(once.parallel, context=2, attention="xla"), once.train)
    assert bytes_per_device(ring)["stash"] == bytes_per_device(twice)["stash"]


def test_full_precision_has_no_16_bit_weights():
    run = run_of(pipe=8, tensor=8, chunks=3, precision="fp32")
    parts, half = bytes_per_device(run), bytes_per_device(dataclasses.replace(run, train=TrainConfig()))
    assert parts["16-bit weights"] == 0
    assert parts["stash"] == 2 * half["stash"]


def test_pricing_a_layout_starts_no_device():
    """On a machine with GPUs the planner would take their memory."""
    code = """
from experiments import own_model
from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, padded_vocabulary, preset
from megajax.estimate.flops import flops_per_step
from megajax.estimate.memory import bytes_per_device
from megajax.runtime.compat import devices_started
run = RunConfig(preset("gpt3-175b"), ParallelConfig(pipe=8, tensor=8, chunks=3), TrainConfig(global_batch_size=64))
for one in (run, own_model.RUN):
    assert sum(bytes_per_device(one).values()) and flops_per_step(one)
print(devices_started())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr[-2000:]


def bytes_of_sparse(part, model=SPARSE, **parallel):
    run = RunConfig(model, ParallelConfig(data=4, **parallel), TrainConfig(global_batch_size=4))
    run.validate()
    return bytes_per_device(run)[part]


def test_experts_are_split_over_their_replicas():
    """By hand: 4 experts of three matrices in each of two layers; ZeRO-1 shards each part over its own replicas."""
    own, common = 2 * 4 * 3 * 8 * 6, 2 * (4 * 8 * 8 + 2 * 8 + 8 * 4) + 8 + 128 * 8
    assert bytes_of_sparse("gradients") == 4 * (own + common)
    assert bytes_of_sparse("gradients", expert=2) == 4 * (own // 2 + common)
    for expert in (1, 2, 4):
        assert bytes_of_sparse("optimizer", zero=1, expert=expert) == 8 * ((own + common) // 4)


def test_tensor_ranks_have_whole_experts_of_their_own():
    """By hand: one of 4 experts on each of two ranks of two replicas, as many parameters as half of each of two have.

    Half as many rows have whole experts' 2 * 6 elements before the activation, and of the hidden size half as many elements.
    """
    own, common = 2 * 3 * 8 * 6, 2 * (4 * 8 * 8 // 2 + 2 * 8 + 8 * 4) + 8 + 128 * 8 // 2
    whole, split = {"tensor": 2, "expert": 4, "expert_tensor": 1}, {"tensor": 2, "expert": 2}
    assert bytes_of_sparse("gradients", **whole) == bytes_of_sparse("gradients", **split) == 4 * (own + common)
    assert bytes_of_sparse("optimizer", zero=1, **whole) == 8 * (common // 4 + own // 2)  # two replicas have the same
    alone = bytes_of_sparse("optimizer", zero=1, **{**whole, "expert": 2})  # four have
    assert alone == 8 * (common // 4 + 2 * own // 4)
    of = lambda part, **more: [bytes_of_sparse(part, pipe=2, **how, **more) for how in (whole, split)]  # noqa: E731
    folded, before = of("stash", schedule="1f1b", recompute="selective")
    assert folded == before
    folded, before = of("stash", schedule="1f1b", recompute="none")
    assert before - folded == 2 * (2 * 16 * 2 - 2 * 16) * 8
    folded, before = of("input to weight gradients", schedule="zb_h1")
    assert before - folded == 2 * (2 * 16 * 2 - 2 * 16) * 8


def test_there_is_room_for_all_rows_of_experts_that_can_be_on_a_device():
    """Of a token's 3 choices 2 can be on a replica that has 2 of 4 experts; its group has 2 replicas, so twice 16 tokens."""
    dropping = dataclasses.replace(SPARSE, expert_capacity=0.75)  # an expert takes 9 of a sample's 16 tokens
    each = 2 * 2 * 6  # bytes of a row before the activation
    one, split, bounded = (
        bytes_of_sparse("stash", model, pipe=2, schedule="1f1b", expert=expert)
        for model, expert in ((SPARSE, 1), (SPARSE, 2), (dropping, 2))
    )
    assert split - one == each * (2 * 16 * 2 - 16 * 3)
    assert bounded - one == each * (2 * 2 * 9 - 16 * 3)

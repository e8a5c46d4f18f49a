"""The time model against the schedules' simulation, published layer and step times, and numbers worked by hand."""

import dataclasses

import pytest

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig, padded_vocabulary, preset
from megajax.estimate import validate
from megajax.estimate.error_bars import ERROR_BARS
from megajax.estimate.gpus import find_gpu
from megajax.estimate.memory import Sharding, rank_parameters
from megajax.estimate.op_costs import FITTED, MEGAJAX, Fitted, OpCosts, Software, spread
from megajax.estimate.published import DEEPSPEED_2021, MEGATRON_2021, MODEL_22B
from megajax.estimate.published_recent import RECENT_ROWS
from megajax.estimate.step_time import layer_times, step_time
from megajax.models.transformer_costs import transformer_costs
from megajax.pipeline.program import StepProgram
from megajax.schedules.registry import SPECS, find, make_schedule
from megajax.schedules.simulate import Costs, simulate_event, simulate_lockstep

A100 = find_gpu("a100-80gb")
# Every fraction is 1, so that a cost is its definition.
IDEAL = Fitted({"a100": 1.0, "h100": 1.0, "h200": 1.0}, 1.0, 1.0, 0.5)


def bubble_of(name, pipe, microbatches, chunks, costs, lockstep):
    parallel = ParallelConfig(pipe=pipe, chunks=chunks, schedule=name)
    run = RunConfig(preset("tiny"), parallel, TrainConfig(global_batch_size=microbatches))
    return StepProgram.of(run).bubble(costs, lockstep)


CLOSED_FORMS = [
    (name, chunks)
    for name, spec in SPECS.items()
    if spec.bubble and spec.drains
    for chunks in {"one": (1,), "two": (2,), "any": (2, 3)}[spec.chunks]
]


@pytest.mark.parametrize(("schedule", "chunks"), CLOSED_FORMS)
@pytest.mark.parametrize("costs", [Costs(1, 2, 1, 1), Costs(1, 3, 2, 1), Costs(1, 2.2, 1.2, 1)])
def test_lockstep_bubbles_by_closed_form_are_those_of_the_simulation(schedule, chunks, costs):
    equal = costs.forward == costs.weight == costs.input
    for pipe, microbatches in ((2, 4), (4, 8), (4, 16), (8, 24)):
        made = make_schedule(schedule, stages=pipe, microbatches=microbatches, chunks=chunks)
        simulated = simulate_lockstep(made, costs).makespan
        predicted = microbatches * chunks * (costs.forward + costs.backward)
        predicted += bubble_of(schedule, pipe, microbatches, chunks, costs, True)
        if made.split and not equal:
            assert simulated * 0.999 <= predicted <= simulated * (1.05 if pipe > 2 else 1.25)
        else:
            assert predicted == pytest.approx(simulated)


@pytest.mark.parametrize(("schedule", "chunks"), [kind for kind in CLOSED_FORMS if not SPECS[kind[0]].split])
def test_free_running_bubbles_by_closed_form_are_those_of_the_simulation(schedule, chunks):
    costs = Costs(1, 3, 2, 1)
    simulated = simulate_event(make_schedule(schedule, stages=4, microbatches=12, chunks=chunks), costs)
    assert bubble_of(schedule, 4, 12, chunks, costs, False) == pytest.approx(simulated.makespan - simulated.ideal)


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_bubble_without_closed_form_is_simulated(lockstep):
    """ZB-H2 (2401.10241): (p - 1) tF, with the drain included."""
    assert find("zb_h2").bubble is None
    assert bubble_of("zb_h2", 4, 8, 1, Costs(1, 2, 1, 1), lockstep) == pytest.approx(3)


def test_a_pipeline_that_never_drains_has_no_bubble():
    assert bubble_of("pipedream_2bw", 4, 8, 1, Costs(), True) == 0


@pytest.fixture(scope="module")
def checks():
    return [validate.check(row) for row in validate.ROWS]


def test_published_throughputs(checks):
    """Bounds by kind over the sources that no constant was fitted to."""
    groups = validate.groups(checks)
    assert len(groups["fitted sources"]) == 22 and len(groups["tested sources"]) == 89
    assert {one.row.source for one in groups["fitted sources"]} == {"2104"}
    bounds = {"Megatron-style": (0.07, 0.18), "FSDP/ZeRO-3": (0.10, 0.45), "context": (0.02, 0.03)}
    for kind, (mean, largest) in bounds.items():
        errors = [abs(one.error) for one in groups[f"tested, {kind}"]]
        assert len(errors) >= 17 and sum(errors) / len(errors) < mean and max(errors) < largest
    assert [abs(one.error) < 0.15 for one in groups["tested, experts"]] == [True, True]


def test_the_error_bars_are_those_of_the_tested_rows(checks):
    for kind, bar in ERROR_BARS.items():
        found = validate.error_bar(validate.groups(checks)[f"tested, {kind}"])
        assert (found.total, found.within) == pytest.approx((bar.total, bar.within), abs=6e-4)


def test_published_parameter_counts():
    """MPT's printed numbers of parameters, from layers and widths; Llama 2 70B's FLOPs of the recipe, 1.82e15 a sample."""
    printed = {
        "760m": 760470528,
        "1b": 1315950592,
        "3b": 2651837440,
        "7b": 6658859008,
        "13b": 12853954560,
        "30b": 29975214080,
        "70b": 64862437376,
    }
    models = {row.runs[0].model.name: row.runs[0].model for row in RECENT_ROWS}
    for name, parameters in printed.items():
        assert models[f"mpt-{name}"].parameters == pytest.approx(parameters, rel=1e-4)
    row = next(row for row in RECENT_ROWS if row.table == "MaxText, FSDP")
    assert row.flops() / row.runs[0].train.global_batch_size == pytest.approx(1.82e15, rel=0.01)


def test_the_fitted_constants_are_what_the_fit_finds():
    found = validate.fit()
    assert found.memory_share == pytest.approx(FITTED.memory_share, abs=0.005)
    assert found.gather_share == pytest.approx(FITTED.gather_share, abs=0.005)
    assert found.gather_overlap == pytest.approx(FITTED.gather_overlap, abs=0.005)
    for chip, share in FITTED.matmul_share.items():
        assert found.matmul_share[chip] == pytest.approx(share, abs=0.005)


def test_the_report_marks_fitted_rows(capsys):
    assert validate.main([]) == 0
    out = capsys.readouterr().out
    assert out.count("  fitted\n") == 7 and "tested, context: 17 rows, mean absolute error" in out


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "forward", "backward"),
    [
        # 2205.05198 table 4, one layer of the 22B model, ms; not used for fitting
        (False, "none", 7.7, 11.9),
        (True, "none", 7.2, 11.8),
        (False, "full", 7.7, 19.5),
        (False, "selective", 7.7, 13.2),
        (True, "selective", 7.2, 13.1),
    ],
)
def test_layer_times_of_2205(sequence_parallel, recompute, forward, backward):
    parallel = ParallelConfig(tensor=8, microbatch_size=4, sequence_parallel=sequence_parallel, recompute=recompute)
    times = layer_times(transformer_costs(MODEL_22B), parallel, OpCosts(A100, "fp16", MEGATRON_2021, FITTED))
    assert times[0].total * 1e3 == pytest.approx(forward, rel=0.1)
    assert times[1].total * 1e3 == pytest.approx(backward, rel=0.15)


def test_recomputation_costs_what_2205_measured():
    """Table 4: full +39%, selective +7% of a layer's time."""

    def total(mode):
        parallel = ParallelConfig(tensor=8, microbatch_size=4, sequence_parallel=False, recompute=mode)
        return sum(
            one.total
            for one in layer_times(transformer_costs(MODEL_22B), parallel, OpCosts(A100, "fp16", MEGATRON_2021, FITTED))
        )

    assert total("full") / total("none") - 1 == pytest.approx(0.39, abs=0.03)
    assert total("selective") / total("none") - 1 == pytest.approx(0.07, abs=0.02)


def test_op_costs_by_hand():
    ops = OpCosts(A100, "bf16", Software("ideal"), IDEAL)
    # 2 * 1000^3 FLOPs at 312 TFLOP/s, and three matrices of 2 MB at 2,039 GB/s
    assert ops.matmul(1000, 1000, 1000) == pytest.approx(2e9 / 312e12 + 6e6 / 2039e9)
    assert ops.collective(1e9, 1, 1) == 0
    # inside a host: 7/8 of it over 77% of 300 GB/s, after a start and seven hops
    assert ops.collective(1e9, 8, 1) == pytest.approx(0.875e9 / (0.77 * 300e9) + 8.4e-6 + 7 * 3.4e-6)
    # sixteen replicas, one in a host: a network adapter each, at the 2104 paper's share of 25 GB/s
    assert ops.collective(1e9, 16, 64) == pytest.approx(15 / 16 * 1e9 / (0.336 * 25e9) + 8.4e-6 + 15 * 14e-6)
    # sixteen neighbours over two hosts have eight adapters each: still slower than NVLink
    assert ops.collective(1e9, 16, 1) == pytest.approx(
        15 / 16 * 1e9 / (8 * 0.336 * 25e9) + 8.4e-6 + 14 * 3.4e-6 + 14e-6
    )
    assert ops.send(1e6, 8) > ops.send(1e6, 4)


def test_spread_follows_the_axis_order():
    parallel = ParallelConfig(data=2, pipe=4, tensor=8)
    assert [spread(parallel, axis) for axis in ("data", "pipe", "tensor")] == [32, 8, 1]
    turned = ParallelConfig(data=2, pipe=4, tensor=8, axis_order=("pipe", "data", "tensor"))
    assert [spread(turned, axis) for axis in ("data", "pipe", "tensor")] == [8, 16, 1]


def test_the_parts_sum_to_the_step_time_and_zero_1_moves_less_than_it_updates():
    run = RunConfig(
        preset("gpt3-13b"), ParallelConfig(data=8, pipe=2, tensor=4, chunks=2), TrainConfig(global_batch_size=64)
    )
    plain, split = (step_time(run, A100, MEGAJAX, sharding=Sharding(zero=level)) for level in (0, 1))
    parts = ("blocks", "head", "tensor", "bubble", "sends", "data", "optimizer", "ends", "gaps", "waits")
    assert plain.total == pytest.approx(sum(getattr(plain, part) for part in parts))
    # eight replicas share the cast, the norm and AdamW, and each sets its sums and its stash to zero
    assert plain.optimizer / 8 < split.optimizer < plain.optimizer / 2
    assert split.data < plain.data


def test_zero_3_by_hand():
    """Eight GPUs of one host: the gathers use NVLink."""
    parallel = ParallelConfig(data=8, recompute="full", sequence_parallel=False)
    run = RunConfig(preset("gpt3-1.3b"), parallel, TrainConfig(global_batch_size=16, precision="fp16"))
    level = Sharding(zero=3)
    parameters = sum(rank_parameters(run, level))
    # 24 layers of four matrices: 96 collectives, each with a start and seven hops; 7/8 of the bytes are sent
    one = 7 / 8 * 2 * parameters / (0.77 * 300e9) + 96 * (8.4e-6 + 7 * 3.4e-6)
    sent = 2 * 4 * one  # two microbatches; three gathers and a scatter
    times = step_time(run, A100, DEEPSPEED_2021, sharding=level, fitted=IDEAL)
    assert times.blocks > sent  # so half of it overlaps, as in IDEAL
    assert times.data == pytest.approx(sent / 2)
    # without gathering ahead nothing overlaps, and each of twelve tensors of a block has its own collective
    one += (12 - 4) * 24 * (8.4e-6 + 7 * 3.4e-6)
    plain = step_time(run, A100, MEGATRON_2021, sharding=level, fitted=IDEAL)
    assert plain.data == pytest.approx(2 * 4 * one)


def test_gradients_are_reduced_while_the_last_chunks_run():
    """With overlap and two chunks on four ranks: half of four microbatches' backwards hides the reduction."""
    slow = dataclasses.replace(A100, network_bandwidth=2e9)
    parallel = ParallelConfig(data=4, pipe=4, tensor=8, chunks=2)
    run = RunConfig(preset("gpt3-13b"), parallel, TrainConfig(global_batch_size=64))
    program = Software("ideal", data_overlap=True)
    exposed = step_time(run, slow, program, sharding=Sharding(), fitted=IDEAL).data
    whole = step_time(run, slow, Software("ideal"), sharding=Sharding(), fitted=IDEAL).data
    backward = layer_times(transformer_costs(run.model), parallel, OpCosts(slow, "bf16", program, IDEAL))[1].total
    assert whole - exposed == pytest.approx(4 / 2 * 10 * backward)


def test_sends_of_fill_and_drain_are_exposed_by_hand():
    """Two chunks on four ranks: the first rank's fill is 2 (4 - 1) + 4 forwards, and as many backwards drain."""
    parallel = ParallelConfig(pipe=4, tensor=8, chunks=2, schedule="interleaved_1f1b")
    model = preset("gpt3-13b")
    program = Software("ideal", send_overlap=True)
    one = 2048 * model.hidden * 2 / 8 / (0.8 * 25e9) + 8.4e-6 + 14e-6  # bf16, split over the tensor group
    for microbatches, ticks in ((64, 10), (4, 8)):  # as many microbatches as ranks: all forwards come first
        run = RunConfig(model, parallel, TrainConfig(global_batch_size=microbatches))
        assert step_time(run, A100, program, fitted=IDEAL).sends == pytest.approx(2 * ticks * one)
    run = RunConfig(model, dataclasses.replace(parallel, chunks=1, schedule="1f1b"), TrainConfig(global_batch_size=64))
    assert step_time(run, A100, program, fitted=IDEAL).sends == pytest.approx(2 * (64 + 3) * one)
    # without sequence parallelism a tensor group sends each element once, and gathers it
    whole = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, sequence_parallel=False))
    gather = 7 / 8 * 2048 * model.hidden * 2 / (0.77 * 300e9) + 8.4e-6 + 7 * 3.4e-6
    split = dataclasses.replace(program, scatter_gather=True)
    assert step_time(whole, A100, split, fitted=IDEAL).sends == pytest.approx(2 * (64 + 3) * (one + gather))


def test_gradient_sums_and_tied_tables_by_hand():
    """A replica of two stages: 6 bytes a microbatch and 10 a step for each parameter; the table's gradient in fp32."""
    run = RunConfig(preset("gpt3-13b"), ParallelConfig(pipe=2, tensor=8), TrainConfig(global_batch_size=8))
    plain, more = Software("ideal"), Software("ideal", accumulation_bytes=6, buffer_bytes=10)
    one, two = (step_time(run, A100, program, sharding=Sharding(), fitted=IDEAL) for program in (plain, more))
    traffic = sum(rank_parameters(run, Sharding())) / 2039e9
    assert two.blocks - one.blocks == pytest.approx(8 * 6 * traffic)
    assert two.optimizer - one.optimizer == pytest.approx(10 * traffic)
    # two ranks in two hosts, one adapter each: an all-reduce sends an eighth of the table once
    rows = padded_vocabulary(run.model.vocabulary, 8) / 8
    assert one.data == pytest.approx(rows * run.model.hidden * 4 / (0.336 * 25e9) + 2 * (8.4e-6 + 14e-6))


def test_an_uneven_last_stage_balances_the_head():
    """126 layers on 16 ranks of 8: the last lacks one, which its logits take the time of."""
    model, program = preset("llama3.1-405b"), Software("ideal")
    parallel = ParallelConfig(pipe=16, tensor=8, chunks=8, schedule="interleaved_1f1b")
    uneven, even = (
        step_time(RunConfig(one, parallel, TrainConfig(global_batch_size=16)), A100, program, fitted=IDEAL)
        for one in (model, dataclasses.replace(model, layers=128))
    )
    assert uneven.blocks == even.blocks
    assert 0 <= uneven.head < even.head / 4


def test_shards_of_fewer_gpus_are_gathered_among_them():
    """FSDP over the eight GPUs of a host, two copies: gathers by NVLink; the shards' gradients are summed over hosts."""
    parallel = ParallelConfig(data=16, sequence_parallel=False)
    run = RunConfig(preset("gpt3-1.3b"), parallel, TrainConfig(global_batch_size=16))
    level, program = Sharding(zero=3, shards=8), Software("ideal", gathered_pieces=1)
    parameters = sum(rank_parameters(run, level))
    each = lambda item: 7 / 8 * item * parameters / (0.77 * 300e9) + 24 * (8.4e-6 + 7 * 3.4e-6)  # noqa: E731
    copies = 2 * (1 / 2 * 4 * parameters / 8 / (0.336 * 25e9) + 8.4e-6 + 14e-6)
    found = step_time(run, A100, program, sharding=level, fitted=IDEAL)
    assert found.data == pytest.approx(2 * each(2) + each(4) + copies)


def test_context_parallelism_splits_the_work_and_sends_keys_and_values_by_hand():
    """Four ranks of one host: a quarter of every matmul and of attention; 3 sends forward, 3 and 4 backward."""
    model = transformer_costs(preset("llama2-7b"))
    ops = OpCosts(A100, "bf16", Software("ideal", fused_attention=True), IDEAL)
    whole, split = (layer_times(model, ParallelConfig(data=1, context=size), ops) for size in (1, 4))
    for one, part in zip(whole, split, strict=True):
        assert part.attention == pytest.approx(one.attention / 4)
        assert part.matmul < one.matmul / 2 and part.elementwise == pytest.approx(one.elementwise / 4)
    one = 2 * 1024 * 4096 * 2 / (0.77 * 300e9) + 8.4e-6 + 3.4e-6  # keys and values of 1,024 tokens in 16 bit
    assert split[0].context == pytest.approx(3 * one) and split[1].context == pytest.approx(7 * one)
    overlapping = OpCosts(A100, "bf16", Software("ideal", fused_attention=True, context_overlap=True), IDEAL)
    hidden = layer_times(model, ParallelConfig(data=1, context=4), overlapping)
    assert hidden[0].context == pytest.approx(3 * max(0, one - split[0].attention / 4))


def test_backwards_wait_for_offloaded_activations():
    parallel = ParallelConfig(pipe=2, chunks=1, schedule="1f1b", recompute="full", offload_activations=True)
    run = RunConfig(preset("gpt3-1.3b"), parallel, TrainConfig(global_batch_size=4))
    # four microbatches of the inputs of twelve blocks, 2,048 tokens of 2,048 in 16 bit, at 32 GB/s; sends are hidden
    assert step_time(run, A100).offload == pytest.approx(4 * 12 * 2048 * 2048 * 2 / 32e9)


def test_unknown_gpus_and_precisions_are_refused():
    with pytest.raises(ConfigError, match="did you mean a100-80gb"):
        find_gpu("a100-80g")
    assert A100.peak("bf16") == 312e12 and find_gpu("h100-80gb").peak("bf16") == 989.4e12

"""The search finds the layouts that 2104.04473 measured as fastest, quickly, and leaves out no legal one."""

import dataclasses
import functools
import itertools
import re
import time

import pytest

from megajax.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.stage_layout import layers_of_stages
from megajax.estimate.error_bars import COMPARISON, comparison_bar
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import find_gpu
from megajax.estimate.memory import bytes_per_device
from megajax.plan.best import DEGREES, best_layouts
from megajax.plan.explain import explain, reasons, several, slower
from megajax.plan.layouts import ALIKE, FIELDS, layouts
from megajax.plan.search import Question, best_by, filters, is_tie, search, usable_bytes
from megajax.plan.suggest import _changes
from megajax.schedules.registry import Slots

# 2104.04473 section 5.4: the models of figures 13 (162.2B) and 14 and 15 (5.9B).
MODEL_162B = ModelConfig(name="162b", layers=32, hidden=20480, heads=128, vocabulary=51200, sequence_length=2048)
MODEL_6B = ModelConfig(name="5.9b", layers=32, hidden=3840, heads=32, vocabulary=51200, sequence_length=2048)
A100 = find_gpu("a100-80gb")
MODEL_13B = Question(preset("gpt3-13b"), 32, A100, 64)
searched = functools.cache(search)  # several tests look at the same layouts


@pytest.mark.parametrize("batch", [32, 128])
def test_162b_on_64_gpus_is_fastest_at_8_by_8(batch):
    """Figure 13: "the best performance is at (8, 8)", for both batch sizes; others are up to 2x slower."""
    found = searched(Question(MODEL_162B, 64, A100, batch, vocab_parallel="tensor"))  # as Megatron-LM has it
    assert found[0].mesh == (8, 8, 1)
    meshes = best_by((one for one in found if one.fits), lambda one: one.mesh)
    assert max(one.time.total for one in meshes.values()) > 1.8 * found[0].time.total


def test_without_a_pipeline_more_replicas_are_faster_than_more_tensor():
    """Figure 15: 5.9B on 64 GPUs: throughput falls as tensor parallelism replaces data parallelism."""
    found = [one for one in search(Question(MODEL_6B, 64, A100, 512, recomputes=("full",))) if one.fits]
    by_tensor = best_by((one for one in found if one.run.parallel.pipe == 1), lambda one: one.run.parallel.tensor)
    speeds = [by_tensor[size].teraflops for size in sorted(by_tensor)]
    assert len(speeds) >= 4 and speeds == sorted(speeds, reverse=True)


@pytest.mark.slow
def test_a_cluster_of_3072_takes_under_fifteen_seconds():
    """All that the command searches by default, with the layouts that the explanation compares."""
    start = time.process_time()  # independent of other processes
    question = Question(preset("gpt3-1t"), 3072, find_gpu("h100-80gb"), 3072, zero=(0, 1, 3), context=None)
    found = best_layouts(dataclasses.replace(question, vocab_parallel="auto"), 10, DEGREES, 1.5)
    assert time.process_time() - start < 15
    assert found.candidates[0].fits and 10 <= len(found.candidates) < 200


@pytest.mark.slow
def test_every_layout_is_legal_once_and_sorted():
    found = searched(MODEL_13B)
    seen = [one.run.parallel for one in found]
    assert len(seen) == len(set(seen)) > 100 and {one.fits for one in found} == {True, False}
    for one in found[::50]:
        one.run.validate(32)
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    times = [one.time.total for one in found if one.fits]
    assert times == sorted(times)
    assert all(one.peak > 0.95 * usable_bytes(A100) for one in found if not one.fits)
    wider = search(dataclasses.replace(MODEL_13B, memory_margin=0.0))
    assert all((one.peak <= usable_bytes(A100)) == one.fits for one in wider)
    more = {one.run.parallel for one in wider if one.fits} - {one.run.parallel for one in found if one.fits}
    assert more == {one.run.parallel for one in wider if one.fits and one.is_tight} and more


def test_all_shapes_are_searched():
    """Every (tensor, pipe, data) whose sizes divide heads and batch, with a layer or more a stage, counted independently."""
    found = searched(MODEL_13B)
    shapes = {
        (tensor, pipe, data)
        for tensor, pipe, data in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32))
        if tensor * pipe * data == 32 and 40 % tensor == 0 and pipe <= 40 and 64 % data == 0
    }
    assert {one.mesh for one in found} == shapes


def test_uneven_stages_are_searched_and_cost_what_their_largest_stage_costs():
    """126 layers on 16 stages: memory and time of the blocks are those of 128 layers, the FLOPs those of 126."""
    model, options = preset("llama3.1-405b"), {"tensor_sizes": (8,), "recomputes": ("full",), "schedules": ("1f1b",)}
    question = Question(model, 1024, find_gpu("h100-80gb"), 512, microbatches=(1,), zero=(1,), **options)
    found = {one.mesh: one for one in search(question)}
    assert set(found) == {(8, pipe, 128 // pipe) for pipe in (1, 2, 4, 8, 16, 32, 64)}  # 128 stages of 126 layers: none
    uneven, even = (
        found[8, 16, 8],
        search(dataclasses.replace(question, model=dataclasses.replace(model, layers=128))),
    )
    even = next(one for one in even if one.mesh == (8, 16, 8))
    assert uneven.memory | {"workspace": 0} == even.memory | {"workspace": 0}  # ZeRO-1 copies uneven stages' gradients
    assert uneven.time == even.time
    assert flops_per_step(uneven.run) < flops_per_step(even.run) and uneven.utilisation < even.utilisation
    assert "126 layers on 16 stages: 14 of 8 layers, 2 of 7 (the first and the last)" in reasons([uneven])[0].text


def test_of_stages_and_chunks_with_equal_largest_sizes_the_fewest_are_searched():
    """80 layers on 8 ranks: 2 chunks of 5 layers, 3 of 4 at most, 4 of 3, 5 of 2, 10 of 1; 6 to 9 are of 2 too."""
    question = Question(
        dataclasses.replace(preset("gpt3-13b"), layers=80), 8, A100, 64, schedules=("interleaved_1f1b",)
    )
    found = {one.run.parallel.chunks for one in search(question) if one.run.parallel.pipe == 8}
    assert found == {2, 3, 4, 5, 10}


def test_days_and_utilisation_by_hand():
    narrow = {"tensor_sizes": (8,), "microbatches": (1,), "recomputes": ("selective",)}
    one = search(Question(preset("gpt3-175b"), 1024, A100, 1536, **narrow))[0]
    # 2205.05198's formula
    flops = 72 * 1536 * 96 * 2048 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288))
    assert one.teraflops == pytest.approx(flops / one.time.total / 1024 / 1e12)
    assert one.utilisation == pytest.approx(one.teraflops / 312)
    assert one.days(300e9) == pytest.approx(300e9 / (1536 * 2048) * one.time.total / 86400)


def test_zero_frees_memory():
    question = Question(preset("gpt3-13b"), 64, A100, 512, microbatches=(1, 4), schedules=("1f1b", "interleaved_1f1b"))
    plain = search(question)
    split = search(dataclasses.replace(question, zero=(1,)))
    plainly = lambda parallel: dataclasses.replace(parallel, zero=0)  # noqa: E731
    fits = lambda found: {plainly(one.run.parallel) for one in found if one.fits}  # noqa: E731
    on_replicas = {parallel for parallel in fits(plain) if parallel.data > 1}
    assert on_replicas < fits(split)


def test_degrees_of_expert_parallelism_divide_experts_and_replicas():
    model, h100 = preset("mixtral-8x7b"), find_gpu("h100-80gb")
    question = Question(model, 16, h100, 16, microbatches=(1,), recomputes=("full",), schedules=("1f1b",))
    runs = [one.run.parallel for one in search(question)]
    for data in {one.data for one in runs}:
        found = {one.expert for one in runs if one.data == data and one.expert_tensor is None}
        assert found == {n for n in (1, 2, 4, 8) if data % n == 0}
    for tensor, data in {(one.tensor, one.data) for one in runs}:  # or the tensor ranks of some replicas split them
        found = {one.expert for one in runs if one.expert_tensor == 1 and (one.tensor, one.data) == (tensor, data)}
        every = {tensor * n for n in (1, 2, 4, 8) if data % n == 0 and 8 % (tensor * n) == 0}
        assert found == (every if tensor > 1 else set())
    asked = {one.run.parallel for one in search(dataclasses.replace(question, expert_tensor=(None,)))}
    assert asked == {one for one in runs if one.expert_tensor is None}
    assert {one.run.parallel.expert for one in search(dataclasses.replace(question, expert=(4, 16)))} == {4}
    with pytest.raises(ConfigError, match="with --expert 16: omit --expert"):
        search(dataclasses.replace(question, expert=(16,)))


def test_experts_over_tensor_ranks_are_faster_where_experts_are_narrow():
    """Qwen3-30B-A3B on two hosts, with tensor groups of four: no tokens of several replicas are gathered over tensor."""
    question = Question(preset("qwen3-30b-a3b"), 16, find_gpu("h100-80gb"), 64, tensor_sizes=(4,), zero=(1,))
    question = dataclasses.replace(question, microbatches=(1,), schedules=("1f1b",), recomputes=("selective",))
    best = best_by((one for one in search(question) if one.fits), lambda one: one.run.parallel.expert_tensor)
    assert best[1].time.total < best[None].time.total
    assert best[1].time.tensor < best[None].time.tensor


def test_nothing_legal_and_nothing_that_fits():
    with pytest.raises(ConfigError, match="no layout of gpt3-175b over 97 GPUs takes a global batch of 3"):
        search(Question(preset("gpt3-175b"), 97, A100, 3))
    found = search(Question(preset("gpt3-1t"), 8, A100, 64))
    assert not any(one.fits for one in found)
    assert found[0].peak == min(one.peak for one in found)


def test_further_fields_are_searched_if_the_question_names_them():
    """Offloaded activations or ring attention make layouts fit that otherwise do not; all others are as without."""
    model = dataclasses.replace(preset("llama2-7b"), sequence_length=32768)
    narrow = {"microbatches": (1,), "schedules": ("1f1b",), "recomputes": ("none",), "tensor_sizes": (1, 2)}
    question = Question(model, 16, find_gpu("h100-80gb"), 16, **narrow)
    plain = {one.run.parallel: one.peak for one in search(question)}
    assert {(one.context, one.offload_activations) for one in plain} == {(1, False)}
    found = search(dataclasses.replace(question, context=None, also=("offload_activations",)))
    layouts = {one.run.parallel: one.peak for one in found}
    assert plain.items() < layouts.items() and all(one.devices == 16 for one in layouts)
    assert {(one.context, one.offload_activations) for one in layouts} == set(
        itertools.product((1, 2, 4, 8, 16), (False, True))
    )
    more = [one.run.parallel for one in found if one.fits and one.run.parallel not in plain]
    assert any(one.context > 1 for one in more) and any(one.offload_activations for one in more)


def test_a_field_is_searched_and_proposed_once_its_values_are_declared(monkeypatch):
    question = dataclasses.replace(MODEL_13B, schedules=("1f1b",), microbatches=(1,), also=("latency_estimates",))
    with pytest.raises(ValueError, match="latency_estimates"):
        search(question)
    values = lambda run, gpus, layout: ("model", "xla")  # noqa: E731
    monkeypatch.setitem(FIELDS, "latency_estimates", values)
    monkeypatch.setitem(ALIKE, "latency_estimates", lambda layout: layout["tensor"] == 1)
    found = {(one.run.parallel.tensor > 1, one.run.parallel.latency_estimates) for one in search(question)}
    assert found == {(False, "model"), (True, "model"), (True, "xla")}
    run = next(one.run for one in search(question) if one.run.parallel.latency_estimates == "xla")
    changed = [fields["latency_estimates"] for fields in _changes(run, 32, ()) if "latency_estimates" in fields]
    assert {"model"} == set(changed)


def test_axes_are_ordered_where_it_matters():
    """Rings of context over 2 GPUs are within a host if data is inside pipe; with one axis there is one order."""
    narrow = {"microbatches": (1,), "schedules": ("1f1b",), "recomputes": ("full",), "tensor_sizes": (1, 2)}
    question = Question(MODEL_6B, 16, find_gpu("h100-80gb"), 16, context=(1, 2), also=("axis_order",), **narrow)
    orders = {}
    for one in search(question):
        parallel = one.run.parallel
        used = sum(size > 1 for size in (parallel.replicas, parallel.pipe, parallel.tensor))
        orders.setdefault((one.mesh, parallel.context, used), set()).add(parallel.axis_order)
    assert {(used, len(found)) for (*_, used), found in orders.items()} == {(1, 1), (2, 2), (3, 6)}
    ring = [one for one in search(question) if one.mesh == (2, 4, 1) and one.run.parallel.context == 2]
    times = {one.run.parallel.axis_order: one.time.context for one in ring}
    assert times["pipe", "data", "tensor"] < times["data", "pipe", "tensor"]


def test_takeaways_come_with_their_numbers():
    found = searched(Question(MODEL_162B, 64, A100, 128, vocab_parallel="tensor"))
    text = explain(found)
    assert max(map(len, text.splitlines())) <= 118
    text = " ".join(text.split())
    assert "confirmed: t=16 exceeds the host of 8 GPUs" in text
    assert "confirmed: 64 is the least that fits." in text
    assert "Takeaway 3" in text and "b=1 " in text and " b=2 " in text
    for topic, text in reasons(found):
        assert topic and text[0].isupper() and text.endswith("."), text


def test_the_part_that_makes_a_layout_faster_is_one_that_takes_less_time():
    found = search(Question(preset("gpt3-13b"), 16, A100, 64, schedules=("1f1b", "interleaved_1f1b")))
    ordered = sorted((one for one in found if one.fits), key=lambda one: one.time.total)
    fast, slow = ordered[0], ordered[-1]
    assert re.search(r"\(\+\d+%, most of it \w+: \+[\d.]+ s\)", slower(slow, fast))
    assert re.search(r"\(-\d+%, most of it \w+: -[\d.]+ s\)", slower(fast, slow))


def test_one_gpu_is_no_choice_of_a_mesh():
    found = search(Question(preset("gpt2"), 1, find_gpu("h100-80gb"), 8))
    assert [topic for topic, _ in reasons(found)] == ["microbatch size", "recomputation"]
    assert " ms" in reasons(found)[0].text and "bubble" not in reasons(found)[0].text


def test_several_are_joined_as_in_a_sentence():
    assert [several(texts) for texts in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]


def test_takeaways_are_not_claimed_if_the_estimates_contradict_them():
    """On a network as fast as NVLink tensor parallelism over hosts is not slower, and the text must say so."""
    fast = dataclasses.replace(A100, network_bandwidth=A100.host_bandwidth, network_share=1.0)
    question = Question(MODEL_162B, 64, fast, 32, tensor_sizes=(16, 32))
    assert "not confirmed here: t=" in reasons(search(question))[0].text


def test_ties_are_those_that_comparisons_cannot_tell_apart():
    """Layouts slower than the fastest by less than comparisons are off by, of layouts that differ as these two do."""
    narrow = {"schedules": ("1f1b", "eager_1f1b", "zb_h1"), "microbatches": (1,), "recomputes": ("selective",)}
    found = [one for one in search(dataclasses.replace(MODEL_13B, zero=(0, 1), **narrow)) if one.fits]
    fastest = found[0]
    assert fastest.run.parallel.schedule == "eager_1f1b"
    for one in found:
        bar = comparison_bar(one.run.parallel, fastest.run.parallel)
        assert is_tie(one, fastest) == (one.time.total <= (1 + bar) * fastest.time.total)
        parallel = one.run.parallel
        splits = parallel.pipe > 1 and parallel.schedule.startswith("zb")
        assert (bar > COMPARISON) == (splits or parallel.zero != fastest.run.parallel.zero)
    longer = lambda share: dataclasses.replace(fastest.time, blocks=fastest.time.blocks + share * fastest.time.total)  # noqa: E731
    near, far = (dataclasses.replace(fastest, time=longer(share * COMPARISON)) for share in (0.9, 1.1))
    assert is_tie(near, fastest) and not is_tie(far, fastest)


def test_orders_of_axes_are_searched_for_groups_of_experts():
    """Two orders; all six if they are asked for, of layouts with one device on an axis those that differ."""
    question = Question(preset("mixtral-8x7b"), 16, find_gpu("h100-80gb"), 16, schedules=("1f1b",), microbatches=(1,))
    orders: dict[bool, set] = {True: set(), False: set()}
    for asked in (question, dataclasses.replace(question, also=("axis_order",))):
        for fields in layouts(asked.base, asked.gpus, filters(asked)):
            if fields["tensor"] > 1 and fields["pipe"] > 1 and fields["data"] > 1:
                orders[fields["expert"] > 1].add(fields["axis_order"])
        usual = {("data", "pipe", "tensor")}
        every = set(itertools.permutations(("data", "pipe", "tensor")))
        both = usual | {("pipe", "data", "tensor")}
        assert orders == ({True: every, False: every} if asked.also else {True: both, False: usual})


def test_first_stages_give_up_slots_where_that_saves_slots_of_dense_layers():
    """DeepSeek-V3: 3 of 61 layers are dense, so on 32 stages a rank has room for one of them instead of two.

    A dense layer's parameters, by hand: latent attention with 128 heads, and an MLP of width 18,432.
    """
    model = preset("deepseek-v3")
    run = RunConfig(
        model, ParallelConfig(pipe=32, schedule="1f1b", expert=4, data=32), TrainConfig(global_batch_size=32)
    )
    usual, own = FIELDS["pipeline_layout"](run, 1024, vars(run.parallel))
    assert usual is None and own == "E(t|)*2(tt|)*29tL"
    assert layers_of_stages(own) == (1, 1, *[2] * 29, 1)
    changed = run.with_layout(pipeline_layout=own)
    changed.validate()
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    dense = attention + 3 * 7168 * 18432 + 2 * 7168 + 1536 + 512
    before, after = (bytes_per_device(one, slots=Slots(0, 0, 0))["gradients"] for one in (run, changed))
    assert before - after == 4 * dense
    # with 61 stages, or layers of one kind, there is nothing to choose
    assert FIELDS["pipeline_layout"](run, 976, vars(run.with_layout(pipe=61).parallel)) == [None]
    alike = dataclasses.replace(run, model=preset("llama3.1-405b"))
    assert FIELDS["pipeline_layout"](alike, 1024, vars(run.parallel)) == [None]

"""Learning rate, weight decay and batch size against Megatron-LM's formulas, reimplemented here, and values by hand."""

import dataclasses
import math

import numpy as np
import pytest

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.config.batch_ramp import batch_size, remaining_steps
from megajax.data.loader import Loader, TokenSamples
from megajax.data.ramp import RampedLoader
from megajax.train import lr_schedule
from tests import small
from tests.train import runs

# 100 steps of 8 samples, 10 of them warm-up.
TRAIN = TrainConfig(
    global_batch_size=8, steps=100, learning_rate=1e-2, minimum_learning_rate=1e-3, warmup_steps=10, precision="fp32"
)


def megatron(train: TrainConfig, n: int) -> float:
    """optimizer_param_scheduler.py's get_lr, in samples, for n > 0 samples."""
    total = train.steps * train.global_batch_size
    warmup = train.warmup_steps * train.global_batch_size if train.warmup_samples is None else train.warmup_samples
    decay = total if train.decay_samples is None else train.decay_samples
    high, low = train.learning_rate, train.minimum_learning_rate
    if warmup > 0 and n <= warmup:
        return high * n / warmup
    if train.learning_rate_decay == "constant":
        return high
    if n > decay:
        return low
    if train.learning_rate_decay == "inverse_square_root":
        return max(low, high * max(warmup, 1) ** 0.5 / n**0.5)
    ratio = (n - warmup) / (decay - warmup)
    if train.learning_rate_decay == "linear":
        coefficient = 1 - ratio
    elif train.learning_rate_decay == "cosine":
        coefficient = 0.5 * (math.cos(math.pi * ratio) + 1)
    else:
        length = decay // 10 if train.cooldown_samples is None else train.cooldown_samples
        if n <= decay - length:
            return high
        ratio = (n - (decay - length)) / length
        coefficient = {
            "linear": 1 - ratio,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1),
            "exponential": 2 * 0.5**ratio - 1,
            "square_root": 1 - math.sqrt(ratio),
        }[train.cooldown]
    return low + coefficient * (high - low)


SHAPES = [{"learning_rate_decay": name} for name in ("constant", "linear", "cosine", "inverse_square_root")] + [
    {"learning_rate_decay": "wsd", "cooldown": name} for name in ("linear", "cosine", "exponential", "square_root")
]
LENGTHS = [
    {},
    {"warmup_steps": 0},
    {"warmup_samples": 33},
    {"decay_samples": 500},
    {"decay_samples": 500, "warmup_samples": 100, "cooldown_samples": 250},
    {"warmup_steps": 100},
]


@pytest.mark.parametrize("length", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape.values()))
def test_learning_rate_is_megatrons(shape, length):
    train = dataclasses.replace(TRAIN, **shape, **length)
    samples = np.arange(1, 900, 7)
    wanted = [megatron(train, int(n)) for n in samples]
    np.testing.assert_allclose(lr_schedule.learning_rate(train, samples), wanted, rtol=2e-5, atol=1e-9)


def test_a_run_ends_at_the_minimum_and_its_first_update_has_a_learning_rate():
    for shape in SHAPES:
        train = dataclasses.replace(TRAIN, **shape)
        assert float(lr_schedule.learning_rate(train, 8)) == pytest.approx(1e-3)  # a tenth of the warm-up is done
        assert float(lr_schedule.learning_rate(train, 80)) == pytest.approx(1e-2)
        last = {"constant": 1e-2, "inverse_square_root": 1e-2 * math.sqrt(0.1)}.get(shape["learning_rate_decay"], 1e-3)
        assert float(lr_schedule.learning_rate(train, 800)) == pytest.approx(last, rel=1e-4)


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 0.06), ("cosine", 0.06)])
def test_weight_decay_ramps_over_the_run(ramp, middle):
    """0.02 to 0.1: both ramps are half way in the middle; after a quarter, 1/4 and (1 - cos(pi/4)) / 2 of the way."""
    train = dataclasses.replace(TRAIN, start_weight_decay=0.02, weight_decay=0.1, weight_decay_ramp=ramp)
    quarter = 0.25 if ramp == "linear" else (1 - math.sqrt(0.5)) / 2
    got = [float(lr_schedule.weight_decay(train, n)) for n in (0, 200, 400, 800, 900)]
    np.testing.assert_allclose(got, [0.02, 0.02 + 0.08 * quarter, middle, 0.1, 0.1], rtol=1e-5)
    assert float(lr_schedule.weight_decay(TRAIN, 5)) == pytest.approx(TRAIN.weight_decay)


RAMPED = dataclasses.replace(TRAIN, global_batch_size=16, batch_ramp=(4, 4, 60), steps=10)


def test_batch_ramp_is_that_of_2104():
    """4, 8, 12 for a third of 60 samples each, then 16: start + int(consumed / (60 / 3)) * increment."""
    sizes = {consumed: batch_size(RAMPED, consumed) for consumed in (0, 19, 20, 39, 40, 59, 60, 1000)}
    assert sizes == {0: 4, 19: 4, 20: 8, 39: 8, 40: 12, 59: 12, 60: 16, 1000: 16}
    assert list(RAMPED.batch_sizes) == [4, 8, 12, 16]
    assert batch_size(TRAIN, 5) == 8 and list(TRAIN.batch_sizes) == [8]
    consumed, sizes = 0, []
    while consumed < 160:
        sizes.append(batch_size(RAMPED, consumed))
        consumed += sizes[-1]
    assert sizes == [4] * 5 + [8] * 3 + [12] * 2 + [16] * 6
    run = RunConfig(runs.MODEL, ParallelConfig(microbatch_size=2, schedule="1f1b"), RAMPED)
    run.validate()
    assert remaining_steps(RAMPED, 0) == (16, 160 + 4) and remaining_steps(RAMPED, 20) == (11, 164)
    assert remaining_steps(RAMPED, 164) == (0, 164) and run.total_samples == 164


def test_a_ramped_loader_gives_every_sample_once():
    run = RunConfig(runs.MODEL, ParallelConfig(microbatch_size=2, data=2, schedule="1f1b"), RAMPED)
    samples = TokenSamples(runs.TOKENS, runs.MODEL.sequence_length, 3)
    loader, consumed, numbers = RampedLoader(Loader(samples, 16, 4), run), 0, []
    while consumed < 160:
        batch = loader.batch(consumed)
        assert batch["tokens"].shape[1:] == (4, 16)
        numbers += batch["sample"].ravel().tolist()
        consumed += batch["sample"].size
    assert numbers == list(range(len(numbers)))
    np.testing.assert_array_equal(Loader(samples, 16, 4).batch(60)["tokens"], loader.batch(60)["tokens"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_ramp": (4, 4)}, "three whole numbers"),
        ({"batch_ramp": (0, 4, 10)}, "whole numbers above 0"),
        ({"batch_ramp": (4, 5, 60)}, "does not get from 4 to global_batch_size = 16 in steps of 5"),
        ({"batch_ramp": (16, 4, 60)}, "does not get from 16"),
        ({"batch_ramp": (4, 4, 600)}, "the run has steps . global_batch_size = 160"),
        ({"batch_ramp": (3, 13, 60)}, "a batch of 3, which is not a multiple of 2.*--batch-ramp 2,2,60"),
        ({"warmup_samples": 200}, "more than the 160 samples of the decay: pass --warmup-samples 16"),
        ({"cooldown_samples": 200}, "pass --cooldown-samples 16"),
        ({"steps": 2**28}, "below 2..31"),
    ],
)
def test_illegal_rates_and_ramps_are_refused(fields, message):
    train = dataclasses.replace(RAMPED, **fields)
    if "batch_ramp" not in fields:
        train = dataclasses.replace(train, batch_ramp=())
    with pytest.raises(ConfigError, match=message) as error:
        RunConfig(runs.MODEL, ParallelConfig(microbatch_size=2, schedule="1f1b"), train).validate()
    assert "pass --" in str(error.value)


@pytest.mark.slow
def test_a_ramped_run_is_the_same_after_a_resume(tmp_path):
    """Rates and batches follow the samples; the step is compiled once for each batch size."""
    train = {"batch_ramp": (8, 8, 40), "steps": 6, "learning_rate_decay": "wsd", "start_weight_decay": 0.0}
    run = runs.make_run((1, 1, 1), schedule="1f1b", train=train)
    training = small.training_of(run)
    whole = runs.go(run, tmp_path / "whole", training=training)
    assert [row["batch"] for row in whole.rows] == [8] * 5 + [16] * 4
    assert [row["samples"] for row in whole.rows][-1] == 104
    rate = [row["learning_rate"] for row in whole.rows]
    np.testing.assert_allclose(rate, [megatron(run.train, row["samples"]) for row in whole.rows], rtol=1e-5)
    assert training._train._cache_size() == 2
    runs.go(run, tmp_path / "part", training=training, stop=runs.StopAfter(4))
    rest = runs.go(run, tmp_path / "part", training=training, resume="auto")
    np.testing.assert_array_equal(rest.losses, whole.losses)


@pytest.mark.slow
def test_a_skipped_step_does_not_advance_the_rates(tmp_path):
    """fp16 with a scale that overflows at first: the loader advances, the learning rate does not."""
    run = runs.make_run((1, 1, 1), schedule="1f1b", steps=8, train={"precision": "fp16", "initial_loss_scale": 2.0**22})
    result = runs.go(run, tmp_path)
    skipped = np.diff([row["skipped_steps"] for row in result.rows], prepend=0)
    assert 0 < skipped.sum() < 8 and result.rows[-1]["skipped_steps"] == skipped.sum()
    assert [row["samples"] for row in result.rows] == [16 * step for step in range(1, 9)]
    trained = 16 * np.cumsum(1 - skipped)
    for row, n in zip(result.rows, trained, strict=True):
        if not skipped[row["step"] - 1]:
            assert row["learning_rate"] == pytest.approx(megatron(run.train, int(n)), rel=1e-5)


def stored(**changes) -> dict:
    return dataclasses.asdict(dataclasses.replace(TRAIN, **changes))


def option_values(text: str) -> dict:
    """The options that a message names, as fields."""
    words = text.partition("to keep it pass ")[2].split()
    names = [word[2:].replace("-", "_") for word in words[::2]]
    kinds = {field.name: field.type for field in dataclasses.fields(TrainConfig)}
    return {
        name: word if kinds[name] is str else (int if "samples" in name else float)(word)
        for name, word in zip(names, words[1::2], strict=True)
    }


CHANGES = {
    "a finished run with more steps": (TRAIN, {"steps": 200}, 100, "--decay-samples 800"),
    "another maximum": (TRAIN, {"learning_rate": 2e-2}, 50, "--learning-rate 0.01"),
    "another warm-up": (TRAIN, {"warmup_steps": 20}, 12, "--warmup-samples 80"),
    "another shape": (TRAIN, {"learning_rate_decay": "linear"}, 40, "--learning-rate-decay cosine"),
    "another batch": (TRAIN, {"global_batch_size": 16}, 40, "--warmup-samples 80 --decay-samples 800"),
    "a later cool-down": (
        dataclasses.replace(TRAIN, learning_rate_decay="wsd"),
        {"steps": 200},
        100,
        "--decay-samples 800 --cooldown-samples 80",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_resumption_says_what_another_schedule_does_to_the_learning_rate(case):
    """The rates by Megatron's formula, and the options that are named give those of before."""
    before, changes, step, options = CHANGES[case]
    now = dataclasses.replace(before, **changes)
    text = lr_schedule.describe_change(dataclasses.asdict(before), now, step, 8 * step, now.global_batch_size)
    samples = 8 * step + now.global_batch_size
    last, following, kept = megatron(before, 8 * step), megatron(now, samples), megatron(before, samples)
    assert text == (
        f"learning rate {last:.3g} at step {step}, {following:.3g} at step {step + 1}; the schedule before would give "
        f"{kept:.3g}: to keep it pass {options}"
    )
    again = dataclasses.replace(now, **option_values(text))
    for n in range(8, 1600, 8):
        assert megatron(again, n) == megatron(before, n)
    assert lr_schedule.describe_change(dataclasses.asdict(before), again, step, 8 * step, 8) == ""


def test_nothing_is_said_of_the_learning_rate_where_it_goes_on():
    """The same schedule in other words, more steps of a constant one, a run that starts, or one with a loss scale."""
    same = dataclasses.replace(TRAIN, warmup_samples=80, decay_samples=800, steps=300)
    constant = {"learning_rate_decay": "constant"}
    for before, now, trained in (
        (stored(), TRAIN, 400),
        (stored(), same, 400),
        (stored(**constant), dataclasses.replace(TRAIN, steps=300, **constant), 800),
        (stored(), dataclasses.replace(TRAIN, learning_rate=1.0), 0),
        (stored() | {"of a newer version": 1}, TRAIN, 400),
    ):
        assert lr_schedule.describe_change(before, now, trained // 8, trained, 8) == ""

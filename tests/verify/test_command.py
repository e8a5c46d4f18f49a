"""Errors in a transformer, recorded references, checkpoints and the command from end to end."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import own_model
from megajax.checkpoint.metadata import Progress
from megajax.config import OutputConfig
from megajax.models import dropout, transformer
from megajax.models.gpt import GPT
from megajax.models.mixers import attention
from megajax.train.trainer import Trainer
from megajax.verify import __main__ as command
from megajax.verify import record_file
from megajax.verify.certify import LiveReference, RecordedReference, Start, certify, record
from megajax.verify.replay import Replay
from tests import small
from tests.verify import planted

pytestmark = pytest.mark.slow
MODEL = dataclasses.replace(small.MODEL, layers=4, hidden=16, heads=2, dropout=0.1)


class Tokens:
    """Random batches of the tiny GPT."""

    def __init__(self, run):
        self.run = run

    def batch(self, consumed: int):
        return small.make_batch(self.run, consumed // small.BATCH)


@functools.cache
def reference() -> Replay:
    """The tiny GPT with dropout on one device, compiled before anything is planted."""
    run = small.make_run(schedule="1f1b", model=MODEL)
    replay = Replay(run, jax.devices())
    replay.perturbed_step(replay.training.init_state(), Tokens(run).batch(0), 0)
    return replay


def compare(replay: Replay, steps: int = 2):
    live = LiveReference(reference(), Tokens(reference().run))
    return certify(live, replay, Tokens(replay.run), steps, Start())


def two_stages(model=None, **options) -> Replay:
    run = small.make_run((2, 2, 1), model=MODEL, schedule="1f1b", **options)
    return Replay(run, jax.devices(), model)


def test_a_transformer_with_dropout_is_equal_on_another_layout():
    verdict = compare(Replay(small.make_run((2, 2, 2), model=MODEL, chunks=2, zero=1), jax.devices()))
    assert verdict.difference is None and len(verdict.rows) == 2


def test_wrong_key_of_the_dropout_in_one_layer():
    class WrongKey(dropout.Dropout):
        def __init__(self, rate, context, microbatch, layer):
            super().__init__(rate, context, microbatch, jnp.where(layer == 2, 1, layer) if rate else layer)

    with planted.patched(transformer, "Dropout", lambda _: WrongKey):
        verdict = compare(two_stages())
    assert (verdict.difference.step, verdict.difference.entry.key) == (1, "output/2")
    assert "layer 2 is on pipe rank 1" in verdict.details and any("all samples" in line for line in verdict.details)


def test_attention_mask_of_one_layer():
    """Layer 1 attends to the next token too."""

    def later(query, key, value, *others, **options):
        return original(query, jnp.roll(key, -1, axis=1), jnp.roll(value, -1, axis=1), *others, **options)

    class WrongMask(GPT):
        def __init__(self, config, context):
            super().__init__(config, context)
            self.other = GPT(config, context)  # jax.checkpoint would return the trace of this model's own block

        def block(self, weights, x, microbatch, layer):
            right = super().block(weights, x, microbatch, layer)
            with planted.patched(attention, "plain_attention", lambda _: later):
                wrong = self.other.block(weights, x, microbatch, layer)
            return jnp.where(layer == 1, wrong, right)

    original = attention.plain_attention
    verdict = compare(two_stages(WrongMask))
    assert (verdict.difference.step, verdict.difference.entry.key) == (1, "output/1")
    assert "layer 1 is on pipe rank 0" in verdict.details


def test_a_recorded_reference_finds_the_same(tmp_path):
    """The file stands for the layout that wrote it; an error is named as with both layouts, but for what needs arrays."""
    path = str(tmp_path / "a.npz")
    live = LiveReference(planted.reference_replay(), planted.Vectors())
    header = record_file.header_of(live.replay.training.program, "", 0)
    record_file.save(path, record(live, 3, Progress(), header))
    stored = RecordedReference(record_file.load(path))
    run = planted.make_run(data=2, pipe=2, schedule="1f1b")
    assert certify(stored, planted.replay_of(run), planted.Vectors(), 3, Start()).difference is None
    wrong = certify(stored, planted.replay_of(run, planted.WrongSign), planted.Vectors(), 3, Start())
    assert (wrong.difference.step, wrong.difference.entry.key) == (1, "gradient/blocks/up/2")
    assert wrong.details == ["layer 2 is on pipe rank 1"]


def test_the_program_computes_what_the_training_step_computes():
    """The state after two steps of `train_step` has the same bits."""
    replay = planted.replay_of(planted.make_run(data=2, pipe=2, schedule="interleaved_1f1b", chunks=2, zero=1))
    training, state, other = replay.training, replay.training.init_state(), replay.training.init_state()
    for step in range(2):
        batch = replay.split(planted.Vectors().batch(step * planted.SAMPLES))
        other, metrics = training.train_step(other, batch)
        _, results = replay.step(state, batch)
        state = results.after
        assert float(metrics["loss"]) == float(results.metrics["loss"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), state, other)


def test_equal_bits_of_a_layout_with_itself():
    replay = planted.replay_of(planted.make_run(data=2, pipe=2, schedule="1f1b"))
    live = LiveReference(planted.without_error(replay.run), planted.Vectors(), exact=True)
    verdict = certify(live, replay, planted.Vectors(), 2, Start())
    assert verdict.difference is None
    assert all(distance == 0 for row in verdict.rows for distance, _ in row.largest.values())


def test_the_command_from_a_checkpoint(tmp_path, capsys):
    """Steps 3 and 4 of a run of the user's own model, on another layout; a record of them, and a wrong seed."""
    own = ["--experiment", "experiments.own_model"]
    a, b = "--pipe 1 --tensor 1 --chunks 1", "--data 1 --tensor 1 --chunks 1 --schedule zb_h1 --microbatch-size 8"
    run = command.options.read(["--a", a, "--record", "x", *own]).a.run(8)
    output = OutputConfig(run_dir=str(tmp_path / "run"), tensorboard=False)
    short = dataclasses.replace(run, train=dataclasses.replace(run.train, steps=2, warmup_steps=0))
    Trainer(short, data=own_model.DATA, output=output, devices=jax.devices()[:2]).fit()
    both = [*own, "--steps", "2", "--resume", str(tmp_path / "run")]
    capsys.readouterr()
    assert command.main(["--a", a, "--b", b, *both, "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["equal"] and [row["step"] for row in verdict["steps"]] == [3, 4]
    assert verdict["programs"]["schedule"]["b"]["name"] == "zb_h1" and "over data" in verdict["programs"]
    path = str(tmp_path / "a.npz")
    assert command.main(["--record", path, "--a", a, *both]) == 0
    assert command.main(["--against", path, "--b", b, *both, "--", "--learning-rate", "0.5"]) == 2
    assert "is of another run: learning_rate was " in capsys.readouterr().err
    assert command.main(["--a", a, "--b", b, *both, "--steps", "999"]) == 2
    left = run.train.steps - 2
    assert f"steps = 999, but the run has {left} steps after step 2: pass -- --steps 1001" in capsys.readouterr().err
    assert command.main(["--a", a, "--b", b, *own, "--resume", str(tmp_path)]) == 2
    assert f"--resume {tmp_path} is neither a checkpoint nor a directory with one" in capsys.readouterr().err

"""Training, from the first step to the sampled text; read it top to bottom."""

import dataclasses
import functools
import math
import time

import jax
import numpy as np

from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.config import ConfigError, RunConfig
from megajax.data.loader import Loader, RampedLoader
from megajax.estimate.flops import flops_per_step
from megajax.estimate.hardware import Peak
from megajax.runtime.distributed import Watch
from megajax.runtime.preemption import Stop
from megajax.train import diagnose
from megajax.train.logging import RunLog, Spikes, Throughput, step_record
from megajax.train.profile import Profile
from megajax.train.step import Training, TrainState


@dataclasses.dataclass(frozen=True)
class Companions:
    """What a run may have beside its training; None for what it does not."""

    checkpoints: Checkpoints | None = None
    stop: Stop | None = None
    profile: Profile | None = None
    watch: Watch | None = None

    def be_patient(self, step: int) -> None:
        """What comes now may take longer than a step."""
        if self.watch:
            self.watch.enter(step, patient=True)


ALONE = Companions()


def throughput_of(run: RunConfig, peak: Peak, batch: int | None = None) -> Throughput:
    """What turns the times of steps of `batch` samples, or of full ones, into tokens/s, TFLOP/s and MFU."""
    share = (batch or run.train.global_batch_size) / run.train.global_batch_size
    return Throughput(
        tokens_per_step=round(share * run.train.global_batch_size * run.model.sequence_length),
        flops_per_step=share * flops_per_step(run),
        devices=run.parallel.devices,
        peak_flops=peak.flops,
    )


def train(
    training: Training,
    batches: Loader | RampedLoader,
    validation: Loader,
    log: RunLog,
    peak: Peak,
    *,
    begin: tuple[TrainState, Progress] | None = None,
    companions: Companions = ALONE,
    explain=diagnose.explain,
) -> TrainState:
    """Runs all steps, with a validation every `validation_every` of them and after the last.

    Saves every `save_every` steps, at the end, and where the run stops before it: `companions.stop.reason` says why.

    Args:
      begin: the state to go on from and where it is in the run; a fresh one if None.
      explain: (training, params, batch, loss scale) -> why a step is not finite.

    Raises:
      ConfigError: the loss or a gradient stopped being finite and `nonfinite` is "stop" (in fp16 that is how the loss
        scale finds its size: the step is skipped), or did so in `nonfinite_limit` steps in a row.
    """
    run, (checkpoints, stop) = training.run, (companions.checkpoints, companions.stop)
    throughput = functools.cache(functools.partial(throughput_of, run, peak))
    spikes, in_a_row, compiled = Spikes(run.train.spike_deviations), 0, set()
    log.compiling()
    state, at = begin or (training.init_state(), Progress())
    while at.samples < run.total_samples:
        before, batch = at, batches.batch(at.samples)
        size = batch["sample"].size
        state, metrics, seconds = _step(training, state, batch, before.step + 1, companions, size not in compiled)
        compiled.add(size)
        skipped, loss = int(metrics["skipped"]), float(metrics["loss"])
        bad = before.nonfinite + (not math.isfinite(loss))
        at = Progress(before.step + 1, before.samples + size, before.skipped + skipped, bad)
        record = step_record(
            at.step,
            metrics,
            at.samples,
            seconds,
            throughput(size),
            batch=size,
            skipped_steps=at.skipped,
            bad_steps=at.nonfinite,
        )
        log.step(record)
        if companions.profile and (text := companions.profile.after(at.step)):
            log.message(text)
        in_a_row = in_a_row + 1 if skipped else 0
        if skipped and (reason := _why(training, state, batch, metrics, in_a_row, explain)):
            _go_on_or_stop(
                run, record, reason, in_a_row, log, functools.partial(_save, log, checkpoints, training, state, before)
            )
        if text := spikes.flag(at.step, loss):
            log.message(f"warning: {text}")
        is_last = at.samples >= run.total_samples
        if checkpoints:
            for text in checkpoints.poll():
                log.message(text)
        if at.step % run.train.validation_every == 0 or is_last:
            companions.be_patient(at.step)
            _validate(training, state, validation, at.step, log)
        if stop and not is_last and stop.agreed():
            log.message(f"step {at.step}: {stop.reason}: saving and leaving")
            is_last = True
        if checkpoints and (is_last or at.step % checkpoints.output.save_every == 0):
            companions.be_patient(at.step)
            _save(log, checkpoints, training, state, at, wait=is_last)
        if is_last:
            break
    return state


def _step(training: Training, state: TrainState, batch, step: int, companions: Companions, is_new: bool):
    """One step and its wall-clock seconds, with compilation where its batch size `is_new`; metrics are on the host."""
    if companions.profile:
        companions.profile.before(step)
    if companions.watch:
        companions.watch.enter(step, patient=is_new)
    start = time.perf_counter()
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
        state, metrics = training.train_step(state, batch)
        metrics = jax.device_get(metrics)
    return state, metrics, time.perf_counter() - start


def _why(training: Training, state: TrainState, batch, metrics, in_a_row: int, explain) -> str | None:
    """What broke the step; None for an overflow in fp16, which is a normal part of its search for a loss scale."""
    normal = training.run.train.precision == "fp16" and math.isfinite(metrics["loss"])
    if normal and in_a_row < training.run.train.nonfinite_limit:
        return None
    return explain(training, state.params, batch, float(metrics["loss_scale"]))


def _go_on_or_stop(run: RunConfig, record, reason: str, in_a_row: int, log: RunLog, save) -> None:
    """Says what broke a step; stops the run if that is what was asked for, or it happens again and again."""
    log.message(f"warning: step {record['step']}: {reason}")
    too_often = in_a_row >= run.train.nonfinite_limit
    if not too_often and (run.train.nonfinite == "skip" or run.train.precision == "fp16"):
        return
    save(wait=True)
    why = f"{in_a_row} steps in a row" if too_often else "training stops before it spoils the weights"
    raise ConfigError(
        f"step {record['step']}: loss {record['loss']:g}, gradient norm {record['grad_norm']:g}: not finite ({reason}); "
        f"{why}. Try a lower --learning-rate or a lower --clip-norm, or --nonfinite skip to pass over such batches."
    )


def _save(log: RunLog, checkpoints: Checkpoints | None, training: Training, state, at: Progress, *, wait: bool) -> None:
    """Starts a save, and waits for its end if nothing comes after it.

    Raises:
      ConfigError: the last save of the run failed.
    """
    if checkpoints is None:
        return
    said = checkpoints.save(training.state_layout, state, at)
    said += checkpoints.wait() if wait else []
    for text in said:
        log.message(text)
    if wait and checkpoints.failed:
        raise ConfigError(said[-1].removeprefix("warning: "))


def _validate(training: Training, state: TrainState, validation: Loader, step: int, log: RunLog) -> None:
    loss = validation_loss(training, state, validation)
    if loss is not None:
        log.message(f"step {step}: validation loss {loss:.4f} per token, perplexity {np.exp(loss):.4g}")


def validation_loss(training: Training, state: TrainState, validation: Loader) -> float | None:
    """Mean loss over the validation set's first `validation_batches` global batches; None if there are to be none.

    A set smaller than that is gone through once, in whole batches, but at least one.
    """
    available = max(1, validation.samples.count // validation.global_batch_size)
    count = min(training.run.train.validation_batches, available)
    losses = [
        float(training.evaluate(state.params, validation.batch(index * validation.global_batch_size)))
        for index in range(count)
    ]
    return sum(losses) / count if count else None

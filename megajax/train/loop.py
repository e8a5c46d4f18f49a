"""Training, from the first step to the sampled text; read it top to bottom."""

import time

import jax
import numpy as np

from megajax.config import ConfigError, RunConfig
from megajax.cost.flops import flops_per_step
from megajax.cost.hardware import Peak
from megajax.data.loader import Loader
from megajax.train.logging import RunLog, Throughput, step_record
from megajax.train.step import Training, TrainState


def throughput_of(run: RunConfig, peak: Peak) -> Throughput:
    """What turns the run's step times into tokens/s, TFLOP/s and MFU."""
    return Throughput(
        tokens_per_step=run.train.global_batch_size * run.model.sequence_length,
        flops_per_step=flops_per_step(run),
        devices=run.parallel.devices,
        peak_flops=peak.flops,
    )


def train(training: Training, batches: Loader, validation: Loader, log: RunLog, peak: Peak) -> TrainState:
    """Runs all steps, with a validation every `validation_every` of them and after the last.

    Raises:
      ConfigError: the loss or a gradient stopped being finite in bf16 or fp32, where nothing can bring it back. (In fp16
        that is how the loss scale finds its size: the step is skipped.)
    """
    run, consumed = training.run, 0
    throughput = throughput_of(run, peak)
    log.compiling()
    state = training.init_state()
    for step in range(1, run.train.steps + 1):
        batch = batches.batch(consumed)
        start = time.perf_counter()
        state, metrics = training.train_step(state, batch)
        jax.block_until_ready(metrics)
        consumed += run.train.global_batch_size
        record = step_record(step, metrics, consumed, time.perf_counter() - start, throughput)
        log.step(record)
        if record["skipped"] and run.train.precision != "fp16":
            raise ConfigError(
                f"step {step}: loss {record['loss']:g}, gradient norm {record['grad_norm']:g}: not finite, so training "
                "stops before it spoils the weights. Try a lower --learning-rate or a lower --clip-norm."
            )
        if step % run.train.validation_every == 0 or step == run.train.steps:
            loss = validation_loss(training, state, validation)
            if loss is not None:
                log.message(f"step {step}: validation loss {loss:.4f} per token, perplexity {np.exp(loss):.4g}")
    return state


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

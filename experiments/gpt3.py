"""Train a GPT with tensor, pipeline and data parallelism.

python -m experiments.gpt3                                     a small GPT on 8 CPU devices, or on the GPUs there are
python -m experiments.gpt3 --data 1 --pipe 4 --tensor 2 --schedule 1f1b
python -m experiments.gpt3 --model gpt3-1.3b --tensor 8 --tokenizer gpt2 --data-path corpus --run-dir runs/1.3b
python -m experiments.gpt3 --config runs/1.3b/config.toml --resume auto                  the same run, where it stopped
python -m experiments.gpt3 --model gpt3-175b --pipe 8 --tensor 8 --chunks 3 --dry-shapes

Every preset is trained with its paper's recipe (RECIPES); without --model, a toy with settings of its own (DEFAULTS).
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from megajax.config import PRESETS, ConfigError, RunConfig
from megajax.config.cli import Experiment, Request, parse
from megajax.config.presets import ALIASES
from megajax.schedules.schedule import ScheduleError
from megajax.schedules.simulate import simulate_lockstep

# What suits eight fake devices on two cores: under three minutes, and the loss visibly falls.
DEFAULTS = {
    "model": "tiny",
    "microbatch_size": 2,
    "global_batch_size": 16,
    "steps": 500,
    "learning_rate": 4e-3,
    "warmup_steps": 25,
    "beta2": 0.98,
    "validation_every": 1000,
    "new_tokens": 200,
}
CPU_DEVICES = 8
SEQUENCE = 2048  # tokens in a sample of GPT-3


def recipe(batch_tokens: float, learning_rate: float) -> dict[str, Any]:
    """GPT-3's training (2005.14165 table 2.1 and appendix B), its batch in samples a multiple of 32.

    The batch ramp is Megatron-LM's for the 175B run (16 more samples at a time over 12 billion tokens) where GPT-3 only
    says "from 32k tokens to the full value over 4 to 12 billion tokens, depending on the model size".
    """
    batch = 32 * round(batch_tokens / SEQUENCE / 32)
    return {
        "global_batch_size": batch,
        "steps": round(300e9 / SEQUENCE / batch),
        "learning_rate": learning_rate,
        "learning_rate_decay": "cosine",
        "warmup_samples": round(375e6 / SEQUENCE),
        "decay_samples": round(260e9 / SEQUENCE),
        "batch_ramp": (16, 16, round((4e9 if batch < 1024 else 12e9) / SEQUENCE)),
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "save_every": 500,
        "nonfinite": "skip",
    }


def llama2(learning_rate: float) -> dict[str, Any]:
    """Llama 2's training (2307.09288 section 2.2): 2 trillion tokens in batches of 4 million."""
    return {
        "global_batch_size": 1024,  # of 4,096 tokens
        "steps": round(2e12 / (1024 * 4096)),
        "learning_rate": learning_rate,
        "learning_rate_decay": "cosine",
        "warmup_steps": 2000,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-5,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "save_every": 500,
        "nonfinite": "skip",
    }


# 1909.08053 section 4.2; its tables and GPT-2's paper have the same shapes of data: 1,024 tokens.
MEGATRON_2019 = {
    "global_batch_size": 512,
    "steps": 300_000,
    "learning_rate": 1.5e-4,
    "minimum_learning_rate": 1e-5,
    "learning_rate_decay": "cosine",
    "warmup_steps": 3000,
    "weight_decay": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "clip_norm": 1.0,
    "recompute": "full",
    "save_every": 5000,
    "nonfinite": "skip",
}
# 2104.04473 table 1 gives the batch in samples; it times steps and does not train. Learning rate and tokens are GPT-3
# 175B's, whose trend over sizes ends there.
MEGATRON_2021 = {
    "megatron-1.7b": 512,
    "megatron-3.6b": 512,
    "megatron-7.5b": 512,
    "megatron-18.4b": 1024,
    "megatron-39.1b": 1536,
    "megatron-76.1b": 1792,
    "megatron-145.6b": 2304,
    "megatron-310.1b": 2160,
    "megatron-529.6b": 2520,
    "megatron-1008b": 3072,
}


# 2005.14165 table 2.1: batch in tokens, learning rate. The minimum is a tenth of it, as everywhere here.
RECIPES = {
    "gpt3-125m": recipe(0.5e6, 6.0e-4),
    "gpt3-350m": recipe(0.5e6, 3.0e-4),
    "gpt3-760m": recipe(0.5e6, 2.5e-4),
    "gpt3-1.3b": recipe(1e6, 2.0e-4),
    "gpt3-2.7b": recipe(1e6, 1.6e-4),
    "gpt3-6.7b": recipe(2e6, 1.2e-4),
    "gpt3-13b": recipe(2e6, 1.0e-4),
    "gpt3-175b": recipe(3.2e6, 0.6e-4),
    "llama2-7b": llama2(3e-4),
}
RECIPES |= {
    name: {
        **recipe(3.2e6, 0.6e-4),
        "global_batch_size": batch,
        "steps": round(300e9 / SEQUENCE / batch),
        "batch_ramp": (),
    }
    for name, batch in MEGATRON_2021.items()
}
RECIPES |= {alias: RECIPES[name] for alias, name in ALIASES.items()}
RECIPES |= {name: MEGATRON_2019 for name in PRESETS if name.startswith("gpt2") or name.endswith("-2019")}
# Text is generated after the training of the toy only.
RECIPES = {name: {**fields, "new_tokens": 0} for name, fields in RECIPES.items()}


EXPERIMENT = Experiment(__doc__ or "", DEFAULTS, RECIPES, program="python -m experiments.gpt3")


def main(arguments: Sequence[str] | None = None, experiment: Experiment = EXPERIMENT) -> int:
    """Runs an experiment; returns the process's exit code: 0, or 2 for a user's mistake.

    Args:
      arguments: the words of the command line; the process's own if None.
      experiment: its default configuration.
    """
    try:
        request = parse(arguments, experiment)
        return dry_shapes(request) if request.dry_shapes else train(request)
    except (ConfigError, ScheduleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def dry_shapes(request: Request) -> int:
    """Prints every parameter's shape, sharding and bytes, on whatever mesh was asked for."""
    from megajax.runtime.mesh import start_devices
    from megajax.train.shapes import describe_shapes

    start_devices("cpu")
    run = request.run(request.devices_needed or CPU_DEVICES, "bf16")
    run.validate()
    print(describe_shapes(run))
    return 0


def train(request: Request) -> int:
    """Brings up the devices, and trains on them."""
    # Imported here: jax may start only after the number of devices is known.
    import jax

    from megajax.runtime import distributed

    started = time.monotonic()
    count = distributed.start(request.launch)
    watch = distributed.Watch(request.launch.peer_timeout, lambda text: print(text, file=sys.stderr))
    try:
        code = train_on_devices(request, count, watch, started)
        watch.close()
        return code
    except (ConfigError, ScheduleError) as error:
        watch.fail(str(error), code=2)
        raise
    except jax.errors.JaxRuntimeError as error:
        watch.lost(error)
        raise


def train_on_devices(request: Request, process_count: int, watch, started: float) -> int:
    """Trains, validates, and shows a text that the model wrote."""
    import numpy as np

    from megajax.data.prefetch import Prefetch
    from megajax.data.ramp import RampedLoader
    from megajax.data.source import DataSource
    from megajax.data.source import describe as describe_data
    from megajax.data.tokenizers import load_tokenizer
    from megajax.estimate.gpus import device_peak
    from megajax.generate import check_sampling, generate
    from megajax.runtime.mesh import make_mesh, start_devices
    from megajax.runtime.preemption import Stop
    from megajax.train.loop import Companions
    from megajax.train.loop import train as train_loop
    from megajax.train.run_directory import Keeper
    from megajax.train.step import make_training

    check_sampling(request.new_tokens, request.temperature, request.top_k)
    devices = start_devices(request.devices, -(-(request.devices_needed or CPU_DEVICES) // process_count))
    on_cpu = devices[0].platform == "cpu"
    run = request.run(len(devices), "fp32" if on_cpu else "bf16")
    run.validate(len(devices))
    tokenizer = load_tokenizer(run.data.tokenizer, run.data.end_of_document)
    check_vocabulary(run, tokenizer)
    prompt = tokenizer.encode(request.prompt)
    keeper = Keeper(run, request.output, tokenizer, request.others)
    source = DataSource(**{field.name: getattr(run.data, field.name) for field in dataclasses.fields(DataSource)})
    batches, validation = source.loaders(run, tokenizer, run.total_samples)
    if run.train.batch_ramp:
        batches = RampedLoader(batches, run)
    training = make_training(run, make_mesh(run.parallel, devices))
    peak = device_peak(devices, run.train.precision)
    begin = keeper.begin(training)
    with keeper.log(begin) as log, Stop(request.output.exit_after_minutes, started) as stop:
        data = describe_data(batches.samples, run.total_samples)
        for line in (*describe(run, training.schedule, training.attention, devices, peak, data), *keeper.said):
            log.message(line)
        companions = Companions(keeper.checkpoints, stop, keeper.profile, watch)
        with Prefetch(batches, training.batch_sharding) as ahead:
            state = train_loop(training, ahead, validation, log, peak, begin=begin, companions=companions)
        log.message(f"waited {ahead.waited:.2f} s for data, the first batch included")
        keeper.close(log)
        if request.new_tokens and not stop.reason:
            ids = generate(
                training.next_token_logits,
                state.params,
                np.array([prompt if len(prompt) else [tokenizer.end_of_document]]),
                request.new_tokens,
                context=run.model.sequence_length,
                temperature=request.temperature,
                top_k=request.top_k,
                seed=run.train.seed,
            )
            log.message(f"\na sample, continuing {request.prompt!r}:\n{tokenizer.decode(ids[0])}")
    return 0


def check_vocabulary(run: RunConfig, tokenizer) -> None:
    """Raises ConfigError where the tokenizer has ids that the model does not know."""
    if tokenizer.vocabulary > run.model.vocabulary:
        raise ConfigError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocabulary} tokens, but model {run.model.name} knows "
            f"{run.model.vocabulary}: pass --vocabulary {tokenizer.vocabulary} or another --tokenizer"
        )


def describe(run: RunConfig, schedule, attention, devices, peak, data: list[str]) -> list[str]:
    """What is about to run, in a few lines; `data` has one for each dataset."""
    model, parallel, train = run.model, run.parallel, run.train
    bubble = simulate_lockstep(schedule).bubble
    shared = f"context {parallel.context} x " if parallel.context > 1 else ""
    return [
        f"model     {model.name}: {model.parameters:,} parameters, {model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads, {model.sequence_length} tokens a sample",
        f"mesh      data {parallel.data} x {shared}pipe {parallel.pipe} x tensor {parallel.tensor} on {len(devices)} "
        f"{devices[0].device_kind} devices, {train.precision}, sequence parallel "
        f"{'on' if parallel.sequence_parallel and parallel.tensor > 1 else 'off'}, recompute {parallel.recompute}",
        f"attention {attention.name}: {attention.reason}; tensor overlap {parallel.tensor_overlap}",
        f"schedule  {schedule.name}, {parallel.chunks} chunks a rank, {run.microbatches} microbatches of "
        f"{parallel.microbatch_size}: bubble {bubble:.1%} of the ideal time, {len(schedule.ticks)} ticks",
        f"steps     {train.steps} of {train.global_batch_size} samples",
        *(f"data      {line}" for line in data),
        f"peak      {peak.flops / 1e12:.3g} TFLOP/s a device ({peak.source}): what MFU is a share of",
    ]


if __name__ == "__main__":
    sys.exit(main())

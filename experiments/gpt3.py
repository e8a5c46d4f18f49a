"""Train a GPT with tensor, pipeline and data parallelism.

python -m experiments.gpt3                                     a small GPT on 8 CPU devices, or on the GPUs there are
python -m experiments.gpt3 --data 1 --pipe 4 --tensor 2 --schedule 1f1b
python -m experiments.gpt3 --model gpt3-1.3b --tensor 8 --tokenizer gpt2 --data-path corpus --split 98,2,0 --steps 10000
python -m experiments.gpt3 --model gpt3-175b --pipe 8 --tensor 8 --chunks 3 --dry-shapes
"""

import dataclasses
import sys
from collections.abc import Sequence

from megajax.config import ConfigError, RunConfig
from megajax.pipeline.schedule import ScheduleError
from megajax.pipeline.simulate import simulate_lockstep
from megajax.train.options import Request, parse

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
}
CPU_DEVICES = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the experiment; returns the process's exit code: 0, or 2 for an error in what was asked."""
    try:
        request = parse(arguments, __doc__, DEFAULTS)
        return dry_shapes(request) if request.dry_shapes else train(request)
    except (ConfigError, ScheduleError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def dry_shapes(request: Request) -> int:
    """Prints every parameter's shape, sharding and bytes, on whatever mesh was asked for."""
    from megajax.mesh import start_devices
    from megajax.train.shapes import describe_shapes

    start_devices("cpu")
    run = request.run(request.devices_needed or CPU_DEVICES, "bf16")
    run.validate()
    print(describe_shapes(run))
    return 0


def train(request: Request) -> int:
    """Trains, validates, and shows a text that the model wrote."""
    # Imported here: jax may start only after the number of devices is known.
    import numpy as np

    from megajax.cost.hardware import device_peak
    from megajax.data.prefetch import Prefetch
    from megajax.data.source import DataSource
    from megajax.data.source import describe as describe_data
    from megajax.data.tokenizers import load_tokenizer
    from megajax.generate import check_sampling, generate
    from megajax.mesh import make_mesh, start_devices
    from megajax.train.logging import JsonLines, RunLog
    from megajax.train.loop import train as train_loop
    from megajax.train.step import make_training

    check_sampling(request.new_tokens, request.temperature, request.top_k)
    devices = start_devices(request.devices, request.devices_needed or CPU_DEVICES)
    on_cpu = devices[0].platform == "cpu"
    run = request.run(len(devices), "fp32" if on_cpu else "bf16")
    run.validate(len(devices))
    tokenizer = load_tokenizer(request.tokenizer, request.end_of_document)
    check_vocabulary(run, tokenizer)
    prompt = tokenizer.encode(request.prompt)
    jsonl = JsonLines(request.log_jsonl) if request.log_jsonl else None
    source = DataSource(**{field.name: getattr(request, field.name) for field in dataclasses.fields(DataSource)})
    needed = run.train.steps * run.train.global_batch_size
    batches, validation = source.loaders(run, tokenizer, needed)
    training = make_training(run, make_mesh(run.parallel, devices))
    peak = device_peak(devices, run.train.precision)
    with RunLog(run.train.steps, run.train.log_every, jsonl=jsonl) as log:
        for line in describe(run, training.schedule, devices, peak, describe_data(batches.samples, needed)):
            log.message(line)
        with Prefetch(batches, training.batch_sharding) as ahead:
            state = train_loop(training, ahead, validation, log, peak)
        log.message(f"waited {ahead.waited:.2f} s for data, the first batch included")
        if request.new_tokens and run.train.steps:
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
            f"{run.model.vocabulary}: type --vocabulary {tokenizer.vocabulary} or another --tokenizer"
        )


def describe(run: RunConfig, schedule, devices, peak, data: list[str]) -> list[str]:
    """What is about to run, in a few lines; `data` has one for each dataset."""
    model, parallel, train = run.model, run.parallel, run.train
    bubble = simulate_lockstep(schedule).bubble
    return [
        f"model     {model.name}: {model.parameters:,} parameters, {model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads, {model.sequence_length} tokens a sample",
        f"mesh      data {parallel.data} x pipe {parallel.pipe} x tensor {parallel.tensor} on {len(devices)} "
        f"{devices[0].device_kind} devices, {train.precision}, sequence parallel "
        f"{'on' if parallel.sequence_parallel and parallel.tensor > 1 else 'off'}, recompute {parallel.recompute}",
        f"schedule  {schedule.name}, {parallel.chunks} chunks a rank, {run.microbatches} microbatches of "
        f"{parallel.microbatch_size}: bubble {bubble:.1%} of the ideal time, {len(schedule.ticks)} ticks",
        f"steps     {train.steps} of {train.global_batch_size} samples",
        *(f"data      {line}" for line in data),
        f"peak      {peak.flops / 1e12:.3g} TFLOP/s a device ({peak.source}): what MFU is a share of",
    ]


if __name__ == "__main__":
    sys.exit(main())

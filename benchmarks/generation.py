"""Tokens per second of generation on several meshes of the same devices, in one run.

    python -m benchmarks.generation                                   data 4 and pipe 4 on four CPU devices
    python -m benchmarks.generation --devices gpu --meshes 1,1,1 --model gpt3-1.3b --samples 32 --precision bf16

Weights are random, drawing is greedy, and compilation is not counted. The meshes take turns, because the machine's speed
varies; the median of their rounds is printed. A device "reads" its weights and one group's caches
once in each tick; the memory's bandwidth bounds decoding on GPUs.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.options import Parser
from megajax.config.sample import SampleConfig
from megajax.runtime.mesh import make_mesh, start_devices
from megajax.schedules.arguments import whole
from megajax.schedules.errors import command

MODEL = ModelConfig(name="benchmark", layers=8, hidden=512, heads=8, vocabulary=8192, sequence_length=512)


def make(mesh: tuple[int, int, int], model: ModelConfig, options: argparse.Namespace, devices):
    """A decoder with random weights on the first devices."""
    import jax

    from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
    from megajax.pipeline.parameters import initial_params

    data, pipe, tensor = mesh
    parallel = ParallelConfig(data=data, pipe=pipe, tensor=tensor)
    run = RunConfig(model, parallel, TrainConfig(precision=options.precision, global_batch_size=data))
    run = decoding_run(run)
    run.validate()
    sizes = DecodeSizes(options.samples, options.prompt, options.new_tokens + 1, options.prefill_chunk)
    decoder = Decoder(run, make_mesh(run.parallel, devices), sizes, SampleConfig(temperature=0))
    shardings = decoder.params_layout.shardings["params"]
    init = jax.jit(lambda: initial_params(decoder.model, run.parallel, jax.random.key(0)), out_shardings=shardings)
    weights = decoder.weights(init())
    decoder.compile(weights)
    return decoder, weights


def one_round(decoder, weights, prompts) -> tuple[float, float]:
    """Seconds of the prefill and of the decoding of all new tokens."""
    start = time.perf_counter()
    batch = decoder.prefill(weights, prompts, range(len(prompts)))
    decoder.first_tokens(batch)
    middle = time.perf_counter()
    for _ in range(decoder.sizes.blocks):
        batch, _ = decoder.decode(weights, batch)
    return middle - start, time.perf_counter() - middle


@command
def main(arguments: Sequence[str] | None) -> None:
    """Measures."""
    parser = Parser(description=__doc__)
    parser.add_argument("--devices", default="cpu:4", help="devices (default: %(default)s)")
    parser.add_argument(
        "--meshes",
        nargs="+",
        default=["4,1,1", "1,4,1"],
        metavar="DATA,PIPE,TENSOR",
        help="meshes to compare, the first is the reference (default: %(default)s)",
    )
    parser.add_argument("--model", default=None, metavar="NAME", help="preset (default: 8 layers of hidden size 512)")
    parser.add_argument("--samples", type=whole(), default=32, help="prompts, all together (default: %(default)s)")
    parser.add_argument("--prompt", type=whole(), default=64, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=whole(), default=32, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--prefill-chunk", type=whole(), default=64, help="tokens run at once (default: %(default)s)")
    parser.add_argument("--precision", default="fp32", choices=("bf16", "fp32"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=whole(), default=3, help="after the first (default: %(default)s)")
    options = parser.parse_args(arguments)
    devices = start_devices(options.devices)
    model = dataclasses.replace(preset(options.model), dropout=0.0) if options.model else MODEL
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, model.vocabulary, options.prompt).astype(np.int32) for _ in range(options.samples)]
    meshes = [tuple(map(int, mesh.split(","))) for mesh in options.meshes]
    made = {mesh: make(mesh, model, options, devices) for mesh in meshes}
    seconds: dict[tuple, list[tuple[float, float]]] = {mesh: [] for mesh in meshes}
    for _ in range(options.rounds + 1):
        for mesh, (decoder, weights) in made.items():
            seconds[mesh].append(one_round(decoder, weights, prompts))
    print(
        f"{model.name}, {model.parameters:,} parameters, {options.precision}, {options.samples} prompts of {options.prompt}"
    )
    reference = None
    for mesh, (decoder, weights) in made.items():
        prefill, decode = (statistics.median(times) for times in zip(*seconds[mesh][1:], strict=True))
        rate = options.samples * options.new_tokens / decode
        reference = reference or rate
        print(
            f"data {mesh[0]} x pipe {mesh[1]} x tensor {mesh[2]}: prefill {options.samples * options.prompt / prefill:,.0f} "
            f"tokens/s, decode {rate:,.0f} tokens/s ({rate / reference:.2f} of the first), reads "
            f"{bytes_per_tick(decoder, weights) * ticks(decoder) / decode / 1e9:,.1f} GB/s a device"
        )


def ticks(decoder) -> int:
    """Ticks of all calls of `decode`."""
    return decoder.sizes.blocks * (decoder.sizes.block * decoder.groups + decoder.groups - 1)


def bytes_per_tick(decoder, weights) -> float:
    """Bytes of a device's weights and of one group's caches."""
    import jax

    of_weights = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(weights))
    return of_weights + decoder.cache_bytes() / decoder.groups


if __name__ == "__main__":
    sys.exit(main())

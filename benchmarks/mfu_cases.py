"""The runs that benchmarks/mfu.py measures, which differ in one option each, and their compiled steps."""

import dataclasses
import time
from collections.abc import Iterable, Sequence

import numpy as np

from megajax.config import ConfigError, RunConfig

# Single-GPU shapes of 2104.04473 table 1 and GPT-3's: h = 2304 has 24 heads, the others heads of 128.
BLOCKS = (2304, 4096, 6144, 12288)
HEADS = {2304: 24}
MICROBATCH_SIZES = (1, 2, 4, 8)
RECOMPUTES = ("none", "selective", "full")
MOST_LAYERS, LAYERS_ON_CPU = 8, 2
MICROBATCHES = 8  # of a step of blocks, so that the optimizer's share is small
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b:2", "zb_h1", "zb_1p_interleaved:2", "zb_v:2")


@dataclasses.dataclass(frozen=True)
class Case:
    """A run to time: the option that is varied, its value, and the run."""

    sweep: str
    label: str
    run: RunConfig


def sweeps(
    base: RunConfig,
    meshes: Sequence[str] | None,
    schedules: Sequence[str] | None,
    microbatch_sizes: Sequence[int] | None,
    recomputes: Sequence[str] | None,
) -> list[Case]:
    """`base` with one option changed at a time. For lists that are not given (None), all legal values are used.

    Raises:
      ConfigError: an invalid value, or one that is not legal for `base`.
    """
    base.validate()
    if schedules and base.parallel.pipe == 1:
        raise ConfigError(f"schedules = {' '.join(schedules)} differ only with a pipeline: pass --pipe 2 or more.")
    found = list(_legal(_mesh_cases(base, meshes or _all_meshes(base.parallel.devices)), meshes))
    if base.parallel.pipe > 1:
        found += _legal(_schedule_cases(base, schedules or SCHEDULES), schedules)
    sizes, modes = microbatch_sizes or MICROBATCH_SIZES, recomputes or RECOMPUTES
    found += _legal(
        [Case("microbatch size", f"b{n}", base.with_layout(microbatch_size=n)) for n in sizes], microbatch_sizes
    )
    found += _legal([Case("recompute", mode, base.with_layout(recompute=mode)) for mode in modes], recomputes)
    return found


def blocks(
    base: RunConfig,
    widths: Sequence[int],
    microbatch_sizes: Sequence[int] | None,
    limit: int | None,
    layers: int | None,
) -> list[Case]:
    """One-device models of each width, for each microbatch size; `base` has all other options.

    Args:
      limit: bytes that a program may use; None, on a CPU, means two layers.
      layers: of all models; None: as many as fit by the memory model, the same for all microbatch sizes.
    """
    from megajax.estimate.memory import bytes_per_device

    sizes = microbatch_sizes or MICROBATCH_SIZES

    def run(width, samples, depth):
        model = dataclasses.replace(
            base.model, name=f"h{width}", layers=depth, hidden=width, heads=HEADS.get(width, max(1, width // 128))
        )
        train = dataclasses.replace(base.train, global_batch_size=MICROBATCHES * samples)
        parallel = dataclasses.replace(base.parallel, microbatch_size=samples)
        return RunConfig(model, parallel, train)

    def depth(width):
        if layers or limit is None:
            return layers or LAYERS_ON_CPU
        largest = max(sizes)
        fit = (n for n in range(MOST_LAYERS, 1, -1) if sum(bytes_per_device(run(width, largest, n)).values()) <= limit)
        return next(fit, 1)

    return [
        Case(f"blocks of h = {width}", f"h{width} b{samples}", run(width, samples, depth(width)))
        for width in widths
        for samples in sizes
    ]


def _legal(cases: Iterable[Case], given: Sequence | None) -> Iterable[Case]:
    """The legal cases; if the values were given, all must be legal."""
    for case in cases:
        try:
            case.run.validate()
        except ConfigError:
            if given:
                raise
            continue
        yield case


def _all_meshes(devices: int) -> list[str]:
    """Every "data,pipe,tensor" of this number of devices."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    return [
        f"{devices // pipe // tensor},{pipe},{tensor}"
        for tensor in sizes
        for pipe in sizes
        if devices % (pipe * tensor) == 0
    ]


def _mesh_cases(base: RunConfig, meshes: Iterable[str]) -> Iterable[Case]:
    """With the base's chunks if the layers can be divided so, otherwise with one."""
    for text in meshes:
        words = text.split(",")
        if len(words) != 3 or not all(word.isdecimal() for word in words):
            raise ConfigError(f"meshes = {text!r} is not DATA,PIPE,TENSOR: pass --meshes 2,2,2 1,4,2.")
        data, pipe, tensor = map(int, words)
        chunks = base.parallel.chunks
        if pipe < 2 or base.model.layers % (pipe * chunks):
            chunks = 1
        run = base.with_layout(data=data, pipe=pipe, tensor=tensor, chunks=chunks)
        yield Case("mesh shape", f"d{data} p{pipe} t{tensor}", run)


def _schedule_cases(base: RunConfig, schedules: Iterable[str]) -> Iterable[Case]:
    for text in schedules:
        name, _, chunks = text.partition(":")
        if chunks and not chunks.isdecimal():
            raise ConfigError(f"schedules = {text!r} is not NAME or NAME:CHUNKS: pass --schedules 1f1b zb_v:2.")
        label = f"{name} v{chunks}" if chunks else name
        yield Case("schedule", label, base.with_layout(schedule=name, chunks=int(chunks or 1)))


class Step:
    """The compiled and warmed-up training step of a run. Calling it runs it once and returns the seconds."""

    def __init__(self, run: RunConfig, devices):
        """Compiles and warms up; raises jax.errors.JaxRuntimeError if the devices do not have enough memory."""
        import jax

        from megajax.runtime.mesh import make_mesh
        from megajax.train.step import make_training

        self.training = make_training(run, make_mesh(run.parallel, devices))
        self.batch = jax.device_put(batch_of(self.training), self.training.batch_sharding)
        self.state = self.training.init_state()
        for _ in range(2):
            self()

    def __call__(self) -> float:
        import jax

        start = time.perf_counter()
        self.state, metrics = self.training.train_step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start


def batch_of(training) -> dict[str, np.ndarray]:
    """A step's batch of random tokens."""
    _, shapes = training.step_shapes()
    random = np.random.default_rng(0)
    draw = lambda shape: random.integers(0, training.run.model.vocabulary, shape.shape, np.int32)  # noqa: E731
    return {
        "tokens": draw(shapes["tokens"]),
        "labels": draw(shapes["labels"]),
        "weights": np.ones(shapes["weights"].shape, np.float32),
        "sample": np.arange(shapes["sample"].size, dtype=np.uint32).reshape(shapes["sample"].shape),
    }

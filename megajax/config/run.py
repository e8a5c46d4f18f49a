"""RunConfig: everything that decides what a run computes, and the rules between its parts."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megajax.config.batch_ramp import remaining_steps
from megajax.config.data import DataConfig
from megajax.config.errors import ConfigError, divisors, either, multiples, one_of, option
from megajax.config.fields import setting
from megajax.config.hashing import HashSlot, hashed_once
from megajax.config.parallel import MOST_CPU_DEVICES, ParallelConfig
from megajax.config.schedule_rules import check_microbatches
from megajax.config.stage_layout import layers_of_stages
from megajax.config.train import TrainConfig
from megajax.schedules.registry import placement_of

PARTS = ("model", "parallel", "train", "data")  # fields of RunConfig, and sections of a saved configuration


@hashed_once
@dataclass(frozen=True)
class RunConfig(HashSlot):
    """Everything that decides what a run computes.

    Attributes:
        model: a ModelConfig, or any frozen dataclass with `name` and `layers` whose model is registered; its
            `validate()` and `check_parallel(parallel)` are called if it has them.
        parallel: the layout.
        train: the optimisation.
        data: the text or datasets, and the tokenizer.
        imports: Python files or modules to import first: they register schedules or models.
    """

    model: Any
    parallel: ParallelConfig
    train: TrainConfig
    data: DataConfig = DataConfig()
    imports: tuple[str, ...] = setting(
        (),
        "Python file to import first; it registers schedules or models; can be repeated",
        metavar="FILE.py",
        text_kind="path",
        list_style="repeat",
    )

    @property
    def parts(self) -> dict[str, Any]:
        """The dataclasses that the run consists of."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total_samples(self) -> int:
        """Samples of the whole run: steps * global_batch_size, or more if the last step of a batch ramp exceeds them."""
        return remaining_steps(self.train, 0)[1]

    @property
    def microbatches(self) -> int:
        """Microbatches each replica runs in a (full) step: m of the pipeline papers."""
        return self.train.global_batch_size // (self.parallel.microbatch_size * self.parallel.data)

    def with_layout(self, **fields: Any) -> "RunConfig":
        """The run with other values of these fields of its layout."""
        return dataclasses.replace(self, parallel=self.parallel.replaced(**fields))

    def validate(self, device_count: int | None = None) -> None:
        """Checks every part by itself, then the parts against one another.

        Args:
            device_count: devices the mesh must use, all of them; None leaves that unchecked.

        Raises:
            ConfigError: for the first rule that is broken: the field, its value, what is legal and which option to pass.
        """
        for part in self.parts.values():
            if hasattr(part, "validate"):
                part.validate()
        self.validate_together()
        if device_count is not None:
            _check_device_count(self, device_count)

    def validate_together(self) -> None:
        """Checks the parts against one another; each of them is legal by itself.

        Raises:
            ConfigError: for the first rule that is broken: the field, its value, what is legal and which option to pass.
        """
        if hasattr(self.model, "check_parallel"):
            self.model.check_parallel(self.parallel)
        _check_layers(self)
        _check_batch(self)
        check_microbatches(self)
        adapters = self.train.init_adapters
        if adapters and not (getattr(self.model, "lora", 0) and self.train.init_from):
            raise ConfigError(
                f"init_adapters = {adapters} needs a model that they are for: pass --init-from and --lora."
            )
        if self.train.matmul_dtype == "fp8" and "tensor_overlap" in self.parallel.rings:
            raise ConfigError(
                "matmul_dtype = fp8 does not work with tensor_overlap = ring, which has separate matmuls: pass "
                "--tensor-overlap none, or omit --matmul-dtype."
            )
        experts = getattr(self.model, "experts", 0)
        if self.train.matmul_dtype == "fp8" != self.train.expert_matmul_dtype and experts:
            raise ConfigError(
                f"matmul_dtype = fp8 is not of the matmuls of experts, and {self.model.name} has {experts}: pass "
                "--expert-matmul-dtype fp8, with --matmul-dtype or without."
            )
        for name, of in (("expert_dispatch_dtype", "tokens that are sent to"), ("expert_matmul_dtype", "matmuls of")):
            if (given := getattr(self.train, name)) and not experts:
                text = f"{name} = {given} is of {of} experts, and {self.model.name} has none"
                raise ConfigError(f"{text}: omit {option(name)}.")


def _check_layers(run: RunConfig) -> None:
    """Groups of layers that are recomputed together are whole, and each stage has one of them or more."""
    layers, parallel, group = run.model.layers, run.parallel, run.parallel.recompute_blocks
    placed = placement_of(parallel.schedule, parallel.pipe, parallel.chunks)
    of_file, own = placed and placed.layers, layers_of_stages(parallel.pipeline_layout)
    if own and of_file:
        raise ConfigError(f"pipeline_layout is given, but {parallel.schedule} has layers of its own: omit one of them.")
    if counts := own or of_file:
        source = f"pipeline_layout = {parallel.pipeline_layout}" if own else parallel.schedule
        if sum(counts) != layers:
            raise ConfigError(
                f"{source} has {sum(counts)} layers in its stages, but layers = {layers}: pass --layers {sum(counts)}, or "
                "another layout."
            )
        return
    stages = parallel.pipe * parallel.chunks
    groups = [size for size in divisors(layers) if layers // size >= stages]
    fewer = one_of("recompute_blocks", groups, group) if group > 1 else ""
    if layers % group:
        more = one_of("layers", multiples(group, layers), layers)
        raise ConfigError(f"recompute_blocks = {group} does not divide layers = {layers}: pass {either(fewer, more)}.")
    if (most := layers // group) < stages:
        pipe = one_of("pipe", range(1 + (parallel.chunks > 1), most // parallel.chunks + 1), parallel.pipe)
        chunks = one_of("chunks", range(1, most // parallel.pipe + 1) if parallel.chunks > 1 else [], parallel.chunks)
        together = f" in {most} groups of recompute_blocks = {group}" if group > 1 else ""
        raise ConfigError(
            f"layers = {layers}{together} cannot be cut into pipe * chunks = {parallel.pipe} * {parallel.chunks} = {stages} "
            f"stages, each of which needs one: pass "
            f"{either(one_of('layers', [stages * group], layers), pipe, chunks, fewer)}."
        )


def _check_batch(run: RunConfig) -> None:
    """The global batch is whole microbatches on each replica."""
    parallel, batch = run.parallel, run.train.global_batch_size
    at_once = parallel.microbatch_size * parallel.data
    if batch % at_once:
        legal = [data for data in divisors(batch) if batch % (data * parallel.microbatch_size) == 0]
        batches = one_of("global_batch_size", multiples(at_once, batch), batch)
        remedies = either(batches, one_of("data", legal, parallel.data)) or "--microbatch-size 1 --data 1"
        raise ConfigError(
            f"global_batch_size = {batch} is not a multiple of microbatch_size * data = {parallel.microbatch_size} * "
            f"{parallel.data} = {at_once}: pass {remedies}."
        )


def _check_device_count(run: RunConfig, device_count: int) -> None:
    """The mesh uses every device; otherwise the message offers the nearest meshes that would and are legal."""
    parallel = run.parallel
    if parallel.devices == device_count:
        return
    # The offered meshes keep `context`; if it does not divide the devices, none is legal.
    whole = device_count % parallel.context == 0
    meshes = (mesh for mesh in _meshes(device_count // parallel.context) if whole and _is_legal(run, mesh))
    fitting = sorted(meshes, key=lambda mesh: (_is_uneven(run, mesh), *_distance(run, mesh)))
    meshes = ", or ".join(" ".join(f"--{axis} {n}" for axis, n in mesh.items()) for mesh in fitting[:3])
    meshes = f"pass {meshes}, or" if meshes else f"no mesh of {device_count} fits this model and batch:"
    trial = (
        f" (for a trial on the CPU: --devices cpu:{parallel.devices})" if parallel.devices <= MOST_CPU_DEVICES else ""
    )
    raise ConfigError(
        f"{_mesh_size(parallel)} = {parallel.devices} devices, "
        f"but there are {device_count}: {meshes} run on {parallel.devices}{trial}."
    )


def _mesh_size(parallel: ParallelConfig) -> str:
    """The degrees and their product written out, "data * pipe * tensor = 2 * 2 * 2"; context if it is not 1."""
    names = ("data", *(("context",) if parallel.context > 1 else ()), "pipe", "tensor")
    return f"{' * '.join(names)} = {' * '.join(str(getattr(parallel, name)) for name in names)}"


def _meshes(devices: int) -> Iterable[dict[str, int]]:
    """Every way to write `devices` (above 0) as data * pipe * tensor."""
    for tensor in divisors(devices) if devices else []:
        for pipe in divisors(devices // tensor):
            yield {"data": devices // tensor // pipe, "pipe": pipe, "tensor": tensor}


def _is_legal(run: RunConfig, mesh: dict[str, int]) -> bool:
    """Whether `run` is legal with another mesh."""
    try:
        run.with_layout(**mesh).validate()
    except ConfigError:
        return False
    return True


def _is_uneven(run: RunConfig, mesh: dict[str, int]) -> bool:
    """Whether stages have slots without a layer."""
    return dataclasses.replace(run.parallel, **mesh).stage_layers(run.model.layers).idle > 0


def _distance(run: RunConfig, mesh: dict[str, int]) -> tuple[float, int, int]:
    """Distance of a mesh from the run's, in doublings; ties go to the smaller tensor, then the smaller pipe."""
    doublings = sum(abs(math.log2(size / getattr(run.parallel, axis))) for axis, size in mesh.items())
    return round(doublings, 6), mesh["tensor"], mesh["pipe"]

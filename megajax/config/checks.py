"""What makes a RunConfig legal, rule by rule. Each message names the field, its value, what is legal, what to type."""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megajax.config.errors import ConfigError, divisors, multiples, near, option, some
from megajax.config.schedule_rules import check_microbatches, check_schedule

if TYPE_CHECKING:  # config imports this module
    from megajax.config import LaunchConfig, ModelConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig

MESH_AXES = ("data", "pipe", "tensor")
BELOW_ONE = {"dropout", "beta1", "beta2"}
MAY_BE_ZERO = BELOW_ONE | {
    "minimum_learning_rate",
    "warmup_steps",
    "weight_decay",
    "start_weight_decay",
    "warmup_samples",
    "cooldown_samples",
    "process_id",
    "seed",
    "validation_batches",
}


def check_run(run: "RunConfig", device_count: int | None = None) -> None:
    """Raises ConfigError for the first rule that `run` breaks; see `RunConfig.validate`."""
    for config in (run.model, run.parallel, run.train):
        check_values(config)
    _check_model(run.model)
    _check_train(run.train)
    _check_tensor(run.model, run.parallel)
    _check_context(run.model, run.parallel)
    _check_pipeline(run.model, run.parallel)
    _check_recompute(run.model, run.parallel)
    _check_unroll(run.parallel)
    _check_batch(run)
    _check_fp8(run)
    _check_batch_ramp(run)
    check_microbatches(run)
    if device_count is not None:
        _check_device_count(run, device_count)


def check_values(config: "ModelConfig | ParallelConfig | TrainConfig | OutputConfig | LaunchConfig") -> None:
    """Each field alone: its type, its range, and its name where names are fixed."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata["choices"] and not (value is None and field.type == str | None):
            names = field.metadata["choices"]
            if value not in names or isinstance(value, bool):
                names = tuple(map(str, names))
                hint = near(str(value), names)
                typed = "|".join(names) if hint.startswith("did") else "and one of them"
                raise ConfigError(f"{field.name} = {value!r} is not known: {hint} Type {option(field.name)} {typed}.")
        elif field.type in (int, float) or (field.type in (int | None, float | None) and value is not None):
            _check_number(field.name, value, whole=field.type in (int, int | None))
        elif field.type is bool and not isinstance(value, bool):
            name = option(field.name)
            raise ConfigError(f"{field.name} = {value!r} must be True or False: type {name} or --no-{name[2:]}.")


def _check_number(name: str, value: int | float, whole: bool) -> None:
    """A number of the right kind, in its range."""
    kind = "a whole number" if whole else "a number"
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    low = "0 or more" if name in MAY_BE_ZERO else ("1 or more" if whole else "above 0")
    legal = f"{low} and below 1" if name in BELOW_ONE else low
    if not number or value < 0 or (value == 0 and name not in MAY_BE_ZERO) or (value >= 1 and name in BELOW_ONE):
        raise ConfigError(f"{name} = {value!r} must be {kind}, {legal}: type {option(name)} with such a value.")


def _check_model(model: "ModelConfig") -> None:
    """The model's own shape."""
    if model.hidden % model.heads:
        raise ConfigError(
            f"hidden = {model.hidden} is not a multiple of heads = {model.heads}: "
            f"type --heads {some(divisors(model.hidden), model.heads)}, "
            f"or --hidden {some(multiples(model.heads, model.hidden), model.hidden)}."
        )
    if model.heads % model.key_value_heads:
        raise ConfigError(
            f"kv_heads = {model.key_value_heads} does not divide heads = {model.heads}: "
            f"type --kv-heads {some(divisors(model.heads), model.key_value_heads)}."
        )
    if model.positions == "rotary" and model.head_size % 2:
        even = [heads for heads in divisors(model.hidden) if model.hidden // heads % 2 == 0]
        heads = f"--heads {some(even, model.heads)}, or " if even else ""
        raise ConfigError(
            f"positions = rotary turns pairs of elements, but the head size hidden / heads = {model.hidden} / "
            f"{model.heads} = {model.head_size} is odd: type {heads}--positions learned."
        )


def _check_train(train: "TrainConfig") -> None:
    """The learning rate's schedule."""
    if train.seed >= 2**32:  # jax's keys take 32 bits and would drop the rest in silence
        raise ConfigError(f"seed = {train.seed} must be below 2**32 = {2**32}: type --seed with such a value.")
    if train.warmup_steps > train.steps:
        raise ConfigError(
            f"warmup_steps = {train.warmup_steps} is more than steps = {train.steps}: "
            f"type --warmup-steps {train.steps // 10}, or --steps with a larger number."
        )
    total = train.steps * train.global_batch_size
    if total >= 2**31:
        most = 2**31 // train.global_batch_size - 1
        raise ConfigError(f"steps * global_batch_size = {total} samples must be below 2**31: type --steps {most}.")
    warmup, decay = train.warmup_samples or 0, train.decay_samples or total
    if warmup > decay:
        raise ConfigError(
            f"warmup_samples = {warmup} is more than the {decay} samples of the decay: type --warmup-samples {decay // 10}."
        )
    if (train.cooldown_samples or 0) > decay:
        raise ConfigError(
            f"cooldown_samples = {train.cooldown_samples} is more than the {decay} samples of the decay: "
            f"type --cooldown-samples {decay // 10}."
        )
    if train.minimum_learning_rate > train.learning_rate:
        raise ConfigError(
            f"minimum_learning_rate = {train.minimum_learning_rate} is above learning_rate = {train.learning_rate}: "
            f"type --minimum-learning-rate {train.learning_rate / 10:g}, or a larger --learning-rate."
        )


def _check_batch_ramp(run: "RunConfig") -> None:
    """START,INCREMENT,SAMPLES reach the global batch, and every batch on the way is legal itself."""
    ramp, batch = run.train.batch_ramp, run.train.global_batch_size
    if not ramp:
        return
    shown = ",".join(map(str, ramp))
    if len(ramp) != 3 or not all(isinstance(n, int) and n > 0 for n in ramp):
        raise ConfigError(
            f"batch_ramp = {shown} must be three whole numbers above 0: type --batch-ramp START,INCREMENT,SAMPLES."
        )
    start, increment, samples = ramp
    if start >= batch or (batch - start) % increment:
        raise ConfigError(
            f"batch_ramp = {shown} does not get from {start} to global_batch_size = {batch} in steps of {increment}: "
            f"type --batch-ramp {increment},{increment},{samples} and a --global-batch-size that is a multiple of it."
        )
    if samples > run.total_samples:
        raise ConfigError(
            f"batch_ramp = {shown} takes {samples} samples, but the run has steps * global_batch_size = "
            f"{run.total_samples}: type --batch-ramp {start},{increment},{run.total_samples // 10 or 1}, or more --steps."
        )


def _check_tensor(model: "ModelConfig", parallel: "ParallelConfig") -> None:
    """Tensor parallelism splits heads, MLP columns and, with sequence parallelism, the sequence."""
    split = {
        "heads": model.heads,
        "kv_heads": model.key_value_heads,
        "feedforward": model.feedforward_size,
    }
    if parallel.sequence_parallel:
        split["sequence_length"] = model.sequence_length // max(1, parallel.context)
    legal = divisors(math.gcd(*split.values()))
    for name, value in split.items():
        if value % parallel.tensor:
            instead = ", or --no-sequence-parallel" if name == "sequence_length" else ""
            raise ConfigError(
                f"{name} = {value} cannot be split over tensor = {parallel.tensor}: "
                f"type --tensor {some(legal, parallel.tensor)}, "
                f"or {option(name)} {some(multiples(parallel.tensor, value), value)}{instead}."
            )


def _check_context(model: "ModelConfig", parallel: "ParallelConfig") -> None:
    """Rings: a sequence is shared out in two pieces a rank; a matmul's ring passes parts of the sequence."""
    if parallel.context > 1 and model.sequence_length % (2 * parallel.context):
        legal = [1] + [n for n in divisors(model.sequence_length) if n > 1 and model.sequence_length % (2 * n) == 0]
        raise ConfigError(
            f"sequence_length = {model.sequence_length} cannot be cut in 2 * context = {2 * parallel.context} pieces: "
            f"type --context {some(legal, parallel.context)}, or --sequence-length "
            f"{some(multiples(2 * parallel.context, model.sequence_length), model.sequence_length)}."
        )
    if parallel.context > 1 and model.dropout > 0:
        raise ConfigError(
            f"dropout = {model.dropout}, but masks are drawn for whole sequences and context = {parallel.context} parts "
            "them: type --dropout 0 or --context 1."
        )
    if parallel.tensor_overlap == "ring" and not parallel.sequence_parallel:
        raise ConfigError(
            "tensor_overlap = ring passes parts of the sequence, which sequence_parallel = False leaves whole: "
            "type --sequence-parallel or --tensor-overlap none."
        )


def _check_pipeline(model: "ModelConfig", parallel: "ParallelConfig") -> None:
    """Chunks fit the schedule; the layers are cut evenly."""
    if sorted(parallel.axis_order) != sorted(MESH_AXES):
        raise ConfigError(
            f"axis_order = {','.join(map(str, parallel.axis_order))} must hold {', '.join(MESH_AXES)} once each, "
            f"outermost first: type --axis-order {','.join(MESH_AXES)}."
        )
    check_schedule(parallel)
    if parallel.chunks > 1 and parallel.pipe == 1:
        raise ConfigError(
            f"chunks = {parallel.chunks} interleaves pipeline stages, but pipe = 1 has no others: "
            "type --chunks 1, or --pipe 2 or more."
        )
    pieces = parallel.pipe * parallel.chunks
    if model.layers % pieces:
        per_pipe = [chunks for chunks in divisors(model.layers) if model.layers % (parallel.pipe * chunks) == 0]
        chunks = f", or --chunks {some(per_pipe, parallel.chunks)}" if per_pipe and parallel.chunks > 1 else ""
        pipes = [pipe for pipe in divisors(model.layers) if model.layers % (pipe * parallel.chunks) == 0]
        pipes = [pipe for pipe in pipes if pipe > 1] if parallel.chunks > 1 else pipes
        pipe = f"--pipe {some(pipes, parallel.pipe)}, or " if pipes else ""
        raise ConfigError(
            f"layers = {model.layers} cannot be cut into pipe * chunks = {parallel.pipe} * {parallel.chunks} = {pieces}"
            f" equal pieces: type {pipe}--layers {some(multiples(pieces, model.layers), model.layers)}{chunks}."
        )


def _check_recompute(model: "ModelConfig", parallel: "ParallelConfig") -> None:
    """Blocks are computed again in whole groups, within a chunk."""
    group, chunk = parallel.recompute_blocks, model.layers // (parallel.pipe * parallel.chunks)
    if group > 1 and parallel.recompute != "full":
        raise ConfigError(
            f"recompute_blocks = {group} is for recompute full, not {parallel.recompute}: type --recompute full, or "
            "leave --recompute-blocks out."
        )
    if chunk % group:
        raise ConfigError(
            f"recompute_blocks = {group} does not divide the {chunk} layers of a chunk (layers / (pipe * chunks)): "
            f"type --recompute-blocks {some(divisors(chunk), group)}."
        )


def _check_unroll(parallel: "ParallelConfig") -> None:
    """What does not go with blocks that have arrays of their own."""
    reasons = {
        "zero = 3": (parallel.zero == 3, "which puts a block's weights together, and so copies them, whenever it runs"),
        f"chunks = {parallel.chunks} and {' and '.join(parallel.rings)}": (
            parallel.chunks > 1 and parallel.rings,
            "a ring, in which ranks at different chunks would have to meet",
        ),
    }
    for field, (given, reason) in reasons.items():
        if parallel.unroll_blocks and given:
            raise ConfigError(f"unroll_blocks does not go with {field}, {reason}: leave --unroll-blocks out.")


def _check_batch(run: "RunConfig") -> None:
    """The global batch is whole microbatches on each replica, in whole rounds of the pipeline where it interleaves."""
    parallel, batch = run.parallel, run.train.global_batch_size
    at_once = parallel.microbatch_size * parallel.data
    if batch % at_once:
        legal = [data for data in divisors(batch) if batch % (data * parallel.microbatch_size) == 0]
        data = f", or --data {some(legal, parallel.data)}" if legal else ""
        raise ConfigError(
            f"global_batch_size = {batch} is not a multiple of microbatch_size * data = {parallel.microbatch_size} * "
            f"{parallel.data} = {at_once}: type --global-batch-size {some(multiples(at_once, batch), batch)}{data}."
        )


def _check_fp8(run: "RunConfig") -> None:
    """What does not go with fp8 matmuls."""
    if run.train.matmul_dtype == "bf16" != run.train.precision:
        raise ConfigError(
            f"matmul_dtype = bf16 does not go with precision = {run.train.precision}: leave --matmul-dtype out."
        )
    if run.train.matmul_dtype != "fp8":
        return
    if run.train.precision == "fp16":
        raise ConfigError(
            "matmul_dtype = fp8 does not go with precision = fp16, in which sums of scaled products overflow: type "
            "--precision bf16."
        )
    if "tensor_overlap" in run.parallel.rings:
        raise ConfigError(
            "matmul_dtype = fp8 does not go with tensor_overlap = ring, whose matmuls are its own: type "
            "--tensor-overlap none, or leave --matmul-dtype out."
        )


def _check_device_count(run: "RunConfig", device_count: int) -> None:
    """The mesh uses every device; otherwise the meshes nearby that would, and that are legal for this run."""
    parallel = run.parallel
    if parallel.devices == device_count:
        return
    shared = parallel.context if device_count % parallel.context == 0 else device_count + 1  # no mesh has that many
    meshes = (mesh for mesh in _meshes(device_count // shared) if _is_legal(run, mesh))
    fitting = sorted(meshes, key=lambda mesh: _far(run, mesh))
    meshes = ", or ".join(" ".join(f"--{axis} {n}" for axis, n in mesh.items()) for mesh in fitting[:3])
    meshes = f"type {meshes}, or" if meshes else f"no mesh of {device_count} fits this model and batch:"
    raise ConfigError(
        f"{_mesh_size(parallel)} = {parallel.devices} devices, "
        f"but there are {device_count}: {meshes} run on {parallel.devices} "
        f"(for a trial on the CPU: --devices cpu:{parallel.devices})."
    )


def _mesh_size(parallel: "ParallelConfig") -> str:
    """The degrees and their product written out, "data * pipe * tensor = 2 * 2 * 2"; context if it is not 1."""
    names = ("data", *(("context",) if parallel.context > 1 else ()), "pipe", "tensor")
    return f"{' * '.join(names)} = {' * '.join(str(getattr(parallel, name)) for name in names)}"


def _meshes(devices: int) -> Iterable[dict[str, int]]:
    """Every way to write `devices` as data * pipe * tensor."""
    for tensor in divisors(devices):
        for pipe in divisors(devices // tensor):
            yield {"data": devices // tensor // pipe, "pipe": pipe, "tensor": tensor}


def _is_legal(run: "RunConfig", mesh: dict[str, int]) -> bool:
    """Whether `run` is legal with another mesh."""
    try:
        check_run(dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **mesh)))
    except ConfigError:
        return False
    return True


def _far(run: "RunConfig", mesh: dict[str, int]) -> tuple[float, int, int]:
    """How far a mesh is from the one given, in doublings; ties go to the smaller tensor, then the smaller pipe."""
    doublings = sum(abs(math.log2(size / getattr(run.parallel, axis))) for axis, size in mesh.items())
    return round(doublings, 6), mesh["tensor"], mesh["pipe"]

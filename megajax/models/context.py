"""The `ModelContext` of a run: sharding rules, attention, fp8 and ring matmuls, token tables, recompute, dropout."""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from megajax.config import ConfigError, ParallelConfig, RunConfig, option
from megajax.models.interface import ModelContext, PipelineModel, model_class
from megajax.ops.attention import Kernel, fused_attention
from megajax.ops.attention_choice import FUSED, Choice, choose_attention, mask_of
from megajax.ops.attention_kernels import CUDNN, INTERPRETED, XLA, cudnn_kernel, tokamax_kernel, with_window
from megajax.ops.collective_matmul import column_matmul, row_matmul
from megajax.ops.distillation import Teacher
from megajax.ops.exchanged_attention import exchanged_attention
from megajax.ops.expert_group import ExpertGroup
from megajax.ops.gated_down import gated_down
from megajax.ops.grouped_matmul import GroupedMatmuls, kernel_for
from megajax.ops.linear import RESIDUAL, Operations, plain_operations
from megajax.ops.norm_kernel import norm_in_one_pass
from megajax.ops.ring_attention import AxisName, gather_sequence, ring_attention, sequence_sum
from megajax.ops.tokamax_kernels import generation
from megajax.ops.vocabulary import VocabularySharding, lookup, over_pipe, plain_lookup
from megajax.sharding.rules import AxisRules, default_rules, only

__all__ = ["attention_choice", "model_context", "model_rules", "model_shapes", "vocabulary_shares"]


def model_rules(run: RunConfig, model: type[PipelineModel] | None = None) -> AxisRules:
    """The sharding rules of a run whose user gives none; `model`: by default the one of the config's type."""
    model = model or model_class(run.model)
    return default_rules(
        sequence_parallel=run.parallel.sequence_parallel,
        vocabulary_over_pipe=model.vocabulary_over_pipe and run.parallel.vocabulary_over_pipe,
        expert_parallel=run.parallel.expert_replicas > 1,
        experts_over_tensor=run.parallel.experts_over_tensor,
    )


def attention_choice(run: RunConfig, device: jax.Device, model: type[PipelineModel] | None = None) -> Choice:
    """The attention that the run gets on devices like this one, and why.

    Raises:
      ConfigError: the requested one cannot run there.
    """
    model = model or model_class(run.model)
    attention, parallel = model.fusable_attention(run.model), run.parallel
    if attention is None:
        fused = parallel.attention in FUSED
        given = f"attention = {parallel.attention}" if fused else f"context = {parallel.context}"
        if fused or parallel.context > 1:
            raise ConfigError(
                f"{given}, but {model.__name__} has no attention that it could apply to: leave "
                f"--{given.partition(' ')[0]} out."
            )
        return Choice("xla", f"{model.__name__} has no attention that could be fused")
    return choose_attention(
        parallel.attention,
        head_sizes=attention.sizes,
        dropout=attention.dropout,
        window=attention.window,
        mask=mask_of(run.data.resets_attention, attention),
        context=parallel.ring_ranks,
        precision=run.train.precision,
        device=device,
    )


def vocabulary_shares(parallel: ParallelConfig, rules: AxisRules) -> int:
    """Devices that the token tables' rows are split over."""
    return rules.shares("vocabulary", parallel.mesh_sizes)


def model_shapes(
    run: RunConfig, model: type[PipelineModel] | None = None, rules: AxisRules | None = None
) -> PipelineModel:
    """The model for `init`, `logical_axes`, `decay_mask`, `batch_shapes` and `costs`: with the run's shapes, on no mesh.

    Raises:
      ConfigError: the rules split token tables over pipe, which the model's ends do not know; or the run has options of
        another loss than the model's.
    """
    model = model or model_class(run.model)
    for name in ("z_loss", "label_smoothing", "distill_weight", "mtp_num_layers"):
        of = run.model if name == "mtp_num_layers" else run.train
        if getattr(of, name, 0) and not model.has_loss_options:
            raise ConfigError(f"{name} is of GPT's loss, which {model.__name__} has not: omit {option(name)}.")
    if run.train.distill_weight and run.parallel.context > 1:
        raise ConfigError("distill_weight does not work with context, which splits the sequence: pass --context 1.")
    rules = rules or model_rules(run, model)
    alone = run.parallel.pipe > 1 and not rules.vocabulary_over_pipe
    if alone and run.parallel.rings and getattr(run.model, "mtp_num_layers", 0):
        raise ConfigError(
            f"{run.parallel.rings[0]} communicates round a ring that all pipeline ranks reach together, and the modules of "
            "mtp_num_layers are on the last stage alone: pass --vocab-parallel pipe, or --pipe 1."
        )
    if rules.vocabulary_over_pipe and not model.vocabulary_over_pipe:
        raise ConfigError(
            f"the sharding rules split vocabulary over pipe, but {model.__name__} has an embedding or a head that need not "
            "know: use default_rules(), or vocabulary_over_pipe = True in the class if they use context.vocabulary."
        )
    vocabulary = VocabularySharding(vocabulary_shares(run.parallel, rules))
    context = ModelContext(vocabulary=vocabulary, tensor=run.parallel.tensor, teacher=teacher_of(run))
    return model(run.model, context)


def teacher_of(run: RunConfig) -> Teacher | None:
    """What the training's loss takes of a teacher; None: nothing."""
    train = run.train
    own = Teacher(train.distill_weight, train.distill_temperature, train.distill_top)
    return own if own.weight else None


def model_context(
    run: RunConfig,
    rules: AxisRules,
    attention: Choice,
    device: jax.Device,
    dtype: Any = jnp.float32,
    training: bool = True,
    in_one_pass: Collection[str] = (),
) -> ModelContext:
    """The `ModelContext` of a run on its mesh.

    Args:
      run: validated.
      rules: how its arrays are sharded.
      attention: see `attention_choice`.
      device: one of the mesh's; it may belong to a topology that is only compiled for.
      dtype: of activations and matmuls.
      training: False: no dropout.
      in_one_pass: see `StepProgram`; on NVIDIA GPUs, from A100s on.

    Raises:
      ConfigError: the rules do not shard experts over a mesh that does; or fp8 without its library.
    """
    split_lookup, shares = (
        partial(lookup, sequence_parallel=rules.sequence_parallel),
        vocabulary_shares(run.parallel, rules),
    )
    vocabulary = VocabularySharding(shares, split_lookup)
    if rules.vocabulary_over_pipe:
        vocabulary = VocabularySharding(shares, *over_pipe(rules.sequence_parallel))
    elif not rules.mesh_axes("vocabulary"):
        vocabulary = VocabularySharding(shares, plain_lookup)
    operations, once = _operations(run, rules, attention, device), "expert_gates" in in_one_pass
    if in_one_pass and generation(device) is not None:
        gated = lambda up, kernel, activation, **how: gated_down(up, kernel, activation, rules.constrain, **how)  # noqa: E731
        kernels = {
            "gates": ("gated", gated),
            "gates_kept": ("gated", partial(gated, kept=True)),
            "norms": ("norm", lambda x, scale, epsilon: norm_in_one_pass(x, scale, epsilon, rules.sequence_parallel)),
        }
        operations = operations._replace(**dict(kernels[name] for name in kernels.keys() & in_one_pass))
    split = "tensor" in rules.mesh_axes("expert_feedforward")
    kernel = kernel_for(device)
    kernel = kernel.in_8_bits() if run.train.expert_matmul_dtype == "fp8" else kernel
    return ModelContext(
        constrain=rules.constrain,
        operations=operations,
        vocabulary=vocabulary,
        dtype=dtype,
        recompute=run.parallel.recompute if run.parallel.recompute_blocks == 1 else "none",  # groups: remat.grouped
        experts=_expert_group(run, rules, device),
        grouped_matmuls=GroupedMatmuls(kernel, True, split, once, rules.experts_over_tensor),
        sum_over_sequence=partial(sequence_sum, axis_name=_replica_axis(run.parallel), ranks=run.parallel.context),
        gather_sequence=partial(gather_sequence, axis_name=_replica_axis(run.parallel), ranks=run.parallel.context),
        dropout_seed=run.train.seed,
        training=training,
        tensor=run.parallel.tensor,
        z_loss=run.train.z_loss if training else 0.0,
        label_smoothing=run.train.label_smoothing if training else 0.0,
        teacher=teacher_of(run) if training else None,
    )


def _replica_axis(parallel: ParallelConfig) -> AxisName:
    """The mesh axis whose neighbours share a sample's sequence: expert parallelism splits it in two."""
    first, *others = parallel.replica_sizes
    return (first, *others) if others else first


def _expert_group(run: RunConfig, rules: AxisRules, device: jax.Device) -> ExpertGroup:
    """The replicas that split the experts of a layer. Dispatch "auto" counts as gather until it is resolved."""
    parallel, fp8 = run.parallel, run.train.expert_dispatch_dtype == "fp8"
    if parallel.expert == 1:
        return ExpertGroup(fp8=fp8)
    if (rules.expert_parallel, rules.experts_over_tensor) != (
        parallel.expert_replicas > 1,
        parallel.experts_over_tensor,
    ):
        raise ConfigError(
            f"expert = {parallel.expert}, but the rules do not shard experts and batch over the mesh axes of expert and "
            "expert_tensor: start from model_rules(run), or pass --expert 1."
        )
    residual = only(rules.spec(RESIDUAL), ("tensor",))
    dispatch = "gather" if parallel.expert_dispatch == "auto" else parallel.expert_dispatch
    shards = parallel.tensor if "tensor" in residual[1:2] else 1
    on_cpu = device.platform == "cpu"
    axes = rules.mesh_axes("experts")
    return ExpertGroup(parallel.expert, residual, shards, dispatch, ragged=not on_cpu, fp8=fp8, axes=axes)


def _operations(run: RunConfig, rules: AxisRules, attention: Choice, device: jax.Device) -> Operations:
    """The operations of the run's blocks."""
    parallel = run.parallel
    product = _fp8_product() if run.train.matmul_dtype == "fp8" else None
    operations = plain_operations(rules.constrain, product)
    if "tensor_overlap" in parallel.rings:

        def column(y, kernel, axes):
            return column_matmul(y, kernel, rules.spec(axes).index("tensor") - 1)

        operations = operations._replace(column=column, row=row_matmul)
    if parallel.context == 1 and attention.name not in FUSED:
        return operations
    kernel = _kernel(attention, parallel, device)

    def attend(query, key, value, document=None, padding=None, causal=True, sinks=None, drop=None):
        return fused_attention(query, key, value, kernel, document, padding, causal, sinks, drop)

    return operations._replace(attend=attend)


def _kernel(attention: Choice, parallel: ParallelConfig, device: jax.Device) -> Kernel:
    """The kernel for a sequence that `parallel.context` ranks share."""
    context = parallel.context
    kernel = {"cudnn": CUDNN, "xla": XLA}.get(attention.name) or (
        INTERPRETED if attention.interpreted else tokamax_kernel(device)
    )
    if parallel.ring_ranks > 1:
        return ring_attention(kernel, _replica_axis(parallel), context, attention.window)
    if attention.name == "cudnn" and attention.window is not None:
        kernel = cudnn_kernel(attention.window)
    else:
        kernel = with_window(kernel, attention.window)
    return kernel if context == 1 else exchanged_attention(kernel, _replica_axis(parallel), context)


def _fp8_product():
    try:
        from megajax.ops import fp8
    except ImportError as error:
        raise ConfigError(
            "matmul_dtype = fp8 needs qwix, which is not installed: run pip install 'megajax[fp8]', or "
            "leave --matmul-dtype out."
        ) from error
    return fp8.tensordot

"""What a run's blocks compute with: which attention, fp8 or not, and whether communication goes in rings beside it."""

import jax
import jax.numpy as jnp

from megajax.config import ConfigError, RunConfig
from megajax.models.transformer import Operations, plain_operations
from megajax.ops.attention import CUDNN, XLA, Choice, choose_attention, fused_attention
from megajax.ops.collective_matmul import column_matmul, row_matmul
from megajax.ops.ring_attention import ring_attention
from megajax.runtime.compat import broken_host_offload
from megajax.runtime.xla_flags import check_ring_flags
from megajax.schedules.registry import find
from megajax.schedules.schedule import Schedule
from megajax.sharding.rules import AxisRules

__all__ = ["attention_choice", "block_operations", "check_offload"]


def attention_choice(run: RunConfig, device: jax.Device) -> Choice:
    """The attention that the run gets on devices like this one, and why.

    Raises:
      ConfigError: the one asked for cannot run there.
    """
    model = run.model
    return choose_attention(
        run.parallel.attention,
        head_size=model.head_size,
        dropout=model.dropout,
        precision=run.train.precision,
        device=device,
    )


def block_operations(run: RunConfig, rules: AxisRules, schedule: Schedule, attention: str) -> Operations:
    """The operations of the run's blocks.

    Args:
      run: validated.
      rules: how its arrays lie.
      schedule: that runs the blocks.
      attention: "xla" or "cudnn".

    Raises:
      ConfigError: a ring under a schedule in which not all ranks run a block at once, or under a flag that breaks it; or
        fp8 without its library.
    """
    parallel = run.parallel
    product = _fp8_product() if run.train.matmul_dtype == "fp8" else jnp.tensordot
    operations = plain_operations(rules.constrain, product)
    for field in parallel.rings:
        _check_ring(field, getattr(parallel, field), schedule)
    if "tensor_overlap" in parallel.rings:

        def column(y, kernel, axes):
            return column_matmul(y, kernel, rules.spec(axes).index("tensor") - 1)

        operations = operations._replace(column=column, row=row_matmul)
    kernel = CUDNN if attention == "cudnn" else XLA
    if parallel.context > 1:
        kernel = ring_attention(kernel, "data", parallel.context)
    if parallel.context > 1 or attention == "cudnn":
        operations = operations._replace(attend=lambda query, key, value: fused_attention(query, key, value, kernel))
    return operations


def check_offload(run: RunConfig, device: jax.Device) -> None:
    """Raises ConfigError where the stash should lie in the host's memory, and devices like this one cannot reach it."""
    if run.parallel.offload_activations and not find(run.parallel.schedule).drains:
        raise ConfigError(
            f"offload_activations = True cannot be had with schedule = {run.parallel.schedule}, whose stash goes over "
            "from step to step: leave --offload-activations out, or type --schedule interleaved_1f1b."
        )
    if run.parallel.offload_activations and broken_host_offload() and device.platform == "gpu":
        raise ConfigError(
            "offload_activations = True gives wrong gradients on GPUs with jaxlib 0.11.0 (openxla/xla#46231): "
            "install another jaxlib, or leave --offload-activations out."
        )
    kinds = [memory.kind for memory in device.addressable_memories()]  # none is known of a device that is not there
    if run.parallel.offload_activations and kinds and "pinned_host" not in kinds:
        raise ConfigError(
            f"offload_activations = True, but {device.device_kind} has no memory called pinned_host "
            f"(it has {', '.join(kinds)}): leave --offload-activations out."
        )


def _fp8_product():
    try:
        from megajax.ops import fp8
    except ImportError as error:
        raise ConfigError(
            "matmul_dtype = fp8 needs qwix, which is not installed: type pip install 'megajax[fp8]', or "
            "leave --matmul-dtype out."
        ) from error
    return fp8.tensordot


def _check_ring(field: str, value, schedule: Schedule) -> None:
    """In a mixed tick one rank runs a block while another does not: it would wait for a send that never comes."""
    if not schedule.paired:
        raise ConfigError(
            f"{field} = {value} sends round a ring inside every block, which {schedule.name} does not run on all ranks "
            "at once: type --schedule interleaved_1f1b, eager_1f1b or gpipe."
        )
    check_ring_flags(field)

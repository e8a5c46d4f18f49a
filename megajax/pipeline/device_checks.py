"""Whether devices can run a step's program; its schedule, its rings and its offloading are all known before it is traced."""

import jax

from megajax.config import ConfigError
from megajax.pipeline.program import StepProgram
from megajax.runtime.compat import broken_host_offload
from megajax.runtime.xla_flags import check_ring_flags

__all__ = ["check_devices"]


def check_devices(program: StepProgram, device: jax.Device) -> None:
    """Raises ConfigError if devices like this one cannot run the program.

    That is: activations should be offloaded to host memory and they cannot; an XLA flag breaks the sends of the executor or
    of blocks; or blocks have a ring under a schedule in which not all ranks run one at once.
    """
    parallel = program.run.parallel
    if parallel.offload_activations:
        _check_offload(program, device)
    if parallel.chunks > 1:  # the executor's sends go round a ring
        check_ring_flags("chunks")
    for field in parallel.rings:
        if not program.paired:  # in a mixed tick a rank would wait for a send that never comes
            instead = "--context-exchange all_to_all" if field == "context" else "--tensor-overlap none"
            raise ConfigError(
                f"{field} = {getattr(parallel, field)} sends round a ring inside every block, which "
                f"{program.schedule.name} does not run on all ranks at once: pass {instead}, or --schedule "
                "interleaved_1f1b, eager_1f1b or gpipe."
            )
        check_ring_flags(field)


def _check_offload(program: StepProgram, device: jax.Device) -> None:
    kinds = [memory.kind for memory in device.addressable_memories()]  # empty for a device that is only compiled for
    if not program.drains:
        schedule = program.run.parallel.schedule
        problem = f"is not supported with schedule = {schedule}, whose stash is carried from step to step"
        raise ConfigError(f"offload_activations = True {problem}: omit --offload-activations, or pass --schedule 1f1b.")
    if broken_host_offload() and device.platform == "gpu":
        problem = "gives wrong gradients on GPUs with jaxlib 0.11.0 (openxla/xla#46231)"
        raise ConfigError(
            f"offload_activations = True {problem}: install another jaxlib, or omit --offload-activations."
        )
    if kinds and "pinned_host" not in kinds:
        problem = f"{device.device_kind} has no memory called pinned_host (it has {', '.join(kinds)})"
        raise ConfigError(f"offload_activations = True, but {problem}: omit --offload-activations.")

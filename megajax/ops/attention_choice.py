"""Which attention a run gets on its devices, and why: XLA's, or one of the fused kernels of `megajax.ops.attention`."""

from typing import NamedTuple

import jax

from megajax.config import ConfigError
from megajax.runtime.compat import cudnn_version

__all__ = ["AS_REQUESTED", "FUSED", "Choice", "choose_attention", "cudnn_installed"]

FUSED = ("cudnn", "pallas")  # the values of --attention with a fused kernel
AS_REQUESTED = "as requested"  # the reason of an implementation that `--attention` names
LARGEST_HEAD = 256  # of the fused kernels


class Choice(NamedTuple):
    """The attention of a run.

    Attributes:
      name: "xla", "cudnn" or "pallas".
      reason: why, as printed at the start.
      window: the sliding window, or None.
      interpreted: whether Pallas's kernel has to run in its interpreter.
    """

    name: str
    reason: str
    window: int | None = None
    interpreted: bool = False


def choose_attention(
    requested: str,
    *,
    head_size: int,
    dropout: float,
    precision: str,
    device: jax.Device,
    cudnn: bool | None = None,
    window: int | None = None,
    mask: str | None = None,
    context: int = 1,
) -> Choice:
    """The attention that runs: the requested one; for "auto" cuDNN's where it can, else Pallas's where it can, else XLA's.

    Args:
      requested: auto, xla, cudnn or pallas.
      head_size: elements of a head.
      dropout: of the model; fused kernels draw no mask that is the same on every mesh, so dropout needs XLA's attention.
      precision: bf16, fp16 or fp32.
      device: one of the mesh's; it may belong to a topology that is only compiled for.
      cudnn: whether the cuDNN library is installed; None: found out here.
      window: the model's sliding window, if it has one.
      mask: what hides keys besides: "documents" if tokens attend to their own document only, "padding" at the end of
        samples; None: nothing.
      context: ranks that share a sample.

    Raises:
      ConfigError: a fused kernel was requested and cannot run: why, and which option to pass.
    """
    if requested == "xla":
        return Choice("xla", AS_REQUESTED, window)
    neither = _kernel_problem(head_size, dropout, precision, device)
    problem = neither or _cudnn_problem(head_size, device, cudnn) or _mask_problem(mask, window, context)
    if requested == "pallas":
        if device.platform != "gpu" and dropout == 0:
            return Choice("pallas", f"as requested; in Pallas's interpreter: {neither}", window, interpreted=True)
        if neither:
            raise ConfigError(f"attention = pallas, but {neither}: pass --attention xla or --attention auto.")
        return Choice("pallas", AS_REQUESTED, window)
    if problem is None:
        reason = AS_REQUESTED if requested == "cudnn" else "the fastest that these devices have"
        return Choice("cudnn", reason, window)
    if requested == "cudnn":
        raise ConfigError(f"attention = cudnn, but {problem}: pass --attention xla or --attention auto.")
    return Choice("xla" if neither else "pallas", problem, window)


def _kernel_problem(head_size, dropout, precision, device) -> str | None:
    """Why no fused kernel can run; None if Pallas's can."""
    capability = getattr(device, "compute_capability", "")
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return f"{device.device_kind} is not an NVIDIA GPU"
    if float(capability) < 8:
        return f"fused attention needs compute capability 8.0 or more, and {device.device_kind} has {capability}"
    if head_size > LARGEST_HEAD:
        return f"fused attention's head size is at most {LARGEST_HEAD}, and this is {head_size}"
    if dropout > 0:
        return f"fused attention cannot drop the same elements on every mesh, and dropout = {dropout}"
    if precision == "fp32":
        return "fused attention computes in bf16 or fp16, and precision = fp32"
    return None


def _cudnn_problem(head_size, device, cudnn) -> str | None:
    """Why cuDNN's attention cannot run where Pallas's can; None if it can."""
    largest = LARGEST_HEAD if float(device.compute_capability) >= 9 else 128
    if head_size > largest or head_size % 8:
        return f"cuDNN's head size is a multiple of 8 up to {largest} on {device.device_kind}, and this is {head_size}"
    if not (cudnn_installed() if cudnn is None else cudnn):
        return "the cuDNN library is not installed (it comes with megajax[cuda12] and megajax[cuda13])"
    return None


def _mask_problem(mask, window, context) -> str | None:
    """Why cuDNN's kernel cannot hide the keys that this run hides; None if it can."""
    if mask == "documents":
        return "cuDNN's kernel has no document mask, which --reset-attention-mask needs"
    if mask == "padding":
        return "cuDNN's kernel is not used with a padding mask, which samples of this model need"
    if window is not None and context > 1:
        return f"cuDNN's kernel has no sliding window between the pieces of context = {context} ranks"
    return None


def cudnn_installed() -> bool:
    """Whether the cuDNN library is installed on this machine; needs no GPU."""
    return cudnn_version() is not None

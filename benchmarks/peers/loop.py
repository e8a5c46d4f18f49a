"""The training step of all peers; imported by their scripts, which run with a Python that has torch.

As in megajax: gradients are accumulated over microbatches, AdamW updates an fp32 copy of the 16-bit weights (in fp32, on a
CPU, the weights themselves), and the gradient is clipped to norm 1. A step is timed until the GPU has finished.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable

try:
    import torch
except ImportError as error:
    print(f"{error.name} is not installed", file=sys.stderr)
    sys.exit(3)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(build: Callable[[dict], torch.nn.Module], versions: dict[str, str]) -> None:
    """Answers the request on stdin.

    Args:
      build: a shape -> a module that maps tokens and labels, [samples, sequence], to the mean loss.
      versions: of the peer's packages.
    """
    request = json.loads(sys.stdin.read())
    device = "cuda" if request["platform"] == "gpu" else "cpu"
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda or "none"} | versions
    for shape in request["shapes"]:
        try:
            seconds = measure(build, shape, device, request["rounds"])
            answer = {"seconds": (statistics.median if device == "cuda" else min)(seconds), "rounds": seconds}
        except torch.OutOfMemoryError:
            answer = {"error": "out of memory"}
        torch.compiler.reset()  # a compiled model is held by the compiler's cache
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(answer | {"versions": versions}), flush=True)


def measure(build: Callable, shape: dict, device: str, rounds: int) -> list[float]:
    """Seconds of `rounds` steps, after three that compile and warm up."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32, as XLA multiplies fp32
    with torch.device(device):
        model = build(shape).to(DTYPES[shape["precision"]])
    batch = torch.randint(
        shape["vocabulary"],
        (shape["microbatches"], 2, shape["microbatch_size"], shape["sequence_length"]),
        device=device,
    )
    step = make_step(model, batch, device)
    return [step() for _ in range(rounds + 3)][3:]


def make_step(model: torch.nn.Module, batch: torch.Tensor, device: str) -> Callable[[], float]:
    """A training step on the batch, which returns its seconds."""
    weights = list(model.parameters())
    full = weights[0].dtype == torch.float32
    masters = weights if full else [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> float:
        start = time.perf_counter()
        for tokens, labels in batch:
            (model(tokens, labels) / len(batch)).backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad if full else weight.grad.float()
            weight.grad = weight.grad if full else None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not full:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step

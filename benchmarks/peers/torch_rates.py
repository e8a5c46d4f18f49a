"""TFLOP/s of PyTorch's matmuls and causal attention on this machine's GPU; reads a JSON object and writes a JSON list.

Run by benchmarks/gpu_day, in a process of its own.
"""

import json
import sys
import time

import torch
from torch.nn import functional

SECONDS = 0.2


def seconds_of(call) -> float:
    """The average time of a call, after two that warm up."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        calls += 5
    return (time.perf_counter() - start) / calls


def matmul(rows: int, inner: int, columns: int) -> float:
    """Of a linear layer's three products."""
    draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, w, slopes = draw(rows, inner), draw(inner, columns), draw(rows, columns)
    return 6 * rows * inner * columns / seconds_of(lambda: (x @ w, slopes @ w.T, x.T @ slopes)) / 1e12


def attention(samples: int, tokens: int, heads: int, groups: int, size: int) -> list[float]:
    """Of the forward, and of the backward, whose time is that of both less the forward's."""
    draw = lambda count: torch.randn(samples, count, tokens, size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    arrays = [x.requires_grad_() for x in (draw(heads), draw(groups), draw(groups))]
    gradient = draw(heads)

    def call():
        return functional.scaled_dot_product_attention(*arrays, is_causal=True, enable_gqa=groups != heads)

    flops = 4 * samples * heads * size * tokens * (tokens + 1) / 2 / 1e12
    forward = seconds_of(call)
    both = seconds_of(lambda: torch.autograd.grad(call(), arrays, gradient))
    return [flops / forward, 2.5 * flops / (both - forward)]


if __name__ == "__main__":
    request = json.loads(sys.stdin.read())
    print(json.dumps([globals()[request["kind"]](*shape) for shape in request["shapes"]]))

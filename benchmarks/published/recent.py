"""Published throughputs of 2022 to 2025, as rows like those of `rows.py`; no constant is fitted to them.

Sources, each read: NVIDIA's DGX Cloud benchmarking recipes (github.com/NVIDIA/dgxc-benchmarking, README files of
nemo_megatron, nemotron, llama3.1 and maxtext, bf16 tables); MosaicML's LLM Foundry (github.com/mosaicml/llm-foundry,
scripts/train/benchmarking/README.md); JAX-Toolbox's README for PAX; BLOOM's training notes
(github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/README.md); MT-NLG, 2201.11990 section 2.4; Llama 3,
2407.21783 table 4; Megatron-LM's rows of MegaScale, 2402.15627 table 2 and figure 9; GPT-NeoX-20B, 2204.06745 and
github.com/EleutherAI/gpt-neox. With experts: the README of Megatron-Core's MoE (github.com/NVIDIA/Megatron-LM,
megatron/core/transformer/moe; the throughput of v0.9, the layout of v0.8), and NeMo AutoModel's
(github.com/NVIDIA-NeMo/Automodel, docs/performance-summary.md, bf16). The FLOPs are this project's count for the model
and the printed seconds or tokens per second, where a table prints either.
"""

import dataclasses
from collections.abc import Iterable

from benchmarks.published.rows import A100, H100, Row, make_run, megatron_bytes
from benchmarks.published.software import (
    AUTOMODEL,
    FSDP_PURE,
    GPT_NEOX,
    JAX_FSDP,
    MEGATRON_2023,
    MEGATRON_DEEPSPEED,
    MEGATRON_MOE,
    META_2024,
    MPT_FSDP,
    NEMO_2024,
    Software,
)
from megajax.config import ModelConfig, RunConfig, preset
from megajax.estimate.flops import flops_per_step
from megajax.estimate.gpus import Gpu, find_gpu
from megajax.estimate.memory import USABLE_SHARE, Sharding, bytes_per_device

__all__ = ["RECENT_ROWS"]

A100_40GB = find_gpu("a100-40gb")
# Jean Zay: four Omni-Path links of 100 Gb/s for the eight GPUs of a node (the notes' "Hardware").
JEAN_ZAY = dataclasses.replace(A100, network_bandwidth=6.25e9)
# Four links of 200 Gb/s for the eight GPUs of a node (2204.06745 section 2.3).
NEOX_NODES = dataclasses.replace(A100_40GB, network_bandwidth=12.5e9)
ZERO_1, FULL_SHARD = Sharding(zero=1), Sharding(zero=3)

NEMOTRON_15B = ModelConfig(
    name="nemotron-15b",
    layers=32,
    hidden=6144,
    heads=48,
    kv_heads=8,
    vocabulary=256000,
    sequence_length=4096,
    tied_embeddings=False,
    biases=False,
    positions="rotary",
)
NEOX_20B = ModelConfig(
    name="gpt-neox-20b",
    layers=44,
    hidden=6144,
    heads=64,
    vocabulary=50432,
    sequence_length=2048,
    tied_embeddings=False,
    positions="rotary",
    rotary_fraction=0.25,
)
BLOOM = ModelConfig(name="bloom-176b", layers=70, hidden=14336, heads=112, vocabulary=250880, sequence_length=2048)
# MPT's layers and widths: with learned positions, biases and 50,368 tokens they have the printed numbers of parameters.
MPT = {
    "760m": (24, 1536),
    "1b": (24, 2048),
    "3b": (32, 2560),
    "7b": (32, 4096),
    "13b": (40, 5120),
    "30b": (48, 7168),
    "70b": (80, 8192),
}


def _timed(
    table: str, runs: tuple[RunConfig, ...], gpu: Gpu, software: Software, seconds: float, sharding: Sharding
) -> Row:
    """A row of printed seconds a step."""
    teraflops = flops_per_step(runs[0]) / seconds / runs[0].parallel.devices / 1e12
    return Row(table, runs, gpu, software, teraflops, sharding=sharding)


def _nemo() -> Iterable[Row]:
    """GPT-3 175B and Nemotron-4 15B on H100s, in bf16; the distributed optimizer shards its state over replicas."""
    gpt3, seconds = preset("gpt3-175b"), (8.309, 8.408, 8.42, 8.453, 8.49)
    for data, time in zip((4, 8, 16, 32, 64), seconds, strict=True):
        run = make_run(gpt3, (4, 8, data), 64 * data, 1, 12)
        yield _timed("NeMo 24.09, H100", (run,), H100, NEMO_2024, time, ZERO_1)
    seconds = (2.812, 2.824, 2.845, 2.859, 2.852, 2.875, 2.895, 2.887)
    for data, time in zip((4, 8, 16, 32, 64, 128, 256, 512), seconds, strict=True):
        run = make_run(NEMOTRON_15B, (4, 1, data), 16 * data, 4, 1)
        yield _timed("NeMo 24.09, H100", (run,), H100, NEMO_2024, time, ZERO_1)


def _nemo_context() -> Iterable[Row]:
    """Llama 3.1 on H100s with two context ranks, next to the tensor ranks; the 405B with fewer layers on fewer GPUs.

    The 405B was trained with GPT-2's tokenizer, so with its vocabulary.
    """
    order = {"context": 2, "axis_order": ("pipe", "data", "tensor")}
    for data, time in zip((4, 8, 16, 32, 64), (12.91, 13.00, 13.05, 13.08, 13.10), strict=True):
        run = make_run(preset("llama3.1-8b"), (1, 1, data), 32 * data, 1, 1, **order)
        yield _timed("NeMo 24.09, context 2", (run,), H100, NEMO_2024, time, ZERO_1)
    for data, time in zip((2, 4, 8, 16, 32, 64), (14.72, 14.73, 14.8, 14.89, 14.92, 14.98), strict=True):
        run = make_run(preset("llama3.1-70b"), (4, 4, data), 64 * data, 1, 5, **order)
        yield _timed("NeMo 24.09, context 2", (run,), H100, NEMO_2024, time, ZERO_1)
    for layers, pipe, data, batch, time in (
        (7, 1, 2, 126, 8.85),
        (21, 3, 2, 126, 8.75),
        (42, 3, 4, 252, 16.93),
        (126, 9, 4, 252, 17.20),
        (126, 9, 8, 504, 17.52),
        (126, 9, 16, 1008, 17.62),
    ):
        model = dataclasses.replace(
            preset("llama3.1-405b"), name=f"405b, {layers} layers", layers=layers, vocabulary=51200
        )
        run = make_run(model, (8, pipe, data), batch, 1, 7 if pipe > 1 else 1, **order)
        yield _timed("NeMo 24.09, context 2", (run,), H100, NEMO_2024, time, ZERO_1)


def _megascale() -> Iterable[Row]:
    """Megatron-LM's rows of 2402.15627: table 2 (175B) and figure 9 (530B, from the printed MFU); 2,048 tokens.

    The layout is table 1's, with six and three chunks; data parallelism is reduced by a reduce-scatter and an all-gather
    (section 3.2). Not printed are the microbatch size and whether FlashAttention, which that commit adds, was on.
    """
    small, large = (
        ModelConfig(
            name=name, layers=layers, hidden=hidden, heads=heads, vocabulary=64000, sequence_length=2048, dropout=0.1
        )
        for name, layers, hidden, heads in (("megascale-175b", 96, 12288, 128), ("megascale-530b", 105, 20480, 160))
    )
    for data, batch, seconds in (
        (4, 768, 40.0),
        (8, 768, 21.2),
        (12, 768, 15.2),
        (16, 768, 11.9),
        (48, 6144, 29.02),
        (96, 6144, 14.78),
        (128, 6144, 12.24),
        (192, 6144, 8.57),
    ):
        runs = _megascale_runs(small, (8, 8, data), batch, 6)
        yield _timed("MegaScale, 2402.15627", runs, A100, MEGATRON_2023, seconds, ZERO_1)
    for data, share in ((8, 0.492), (16, 0.488), (40, 0.482)):
        runs = _megascale_runs(large, (8, 35, data), 280 * data, 3)
        teraflops = share * A100.peak("bf16") / 1e12
        yield Row("MegaScale, 2402.15627", runs, A100, MEGATRON_2023, teraflops, sharding=ZERO_1)


def _megascale_runs(model: ModelConfig, mesh: tuple[int, int, int], batch: int, chunks: int) -> tuple[RunConfig, ...]:
    """With each microbatch size that the schedule takes and that fits, with and without FlashAttention."""
    _, pipe, data = mesh
    runs = (
        make_run(model, mesh, batch, microbatch, chunks, attention=attention)
        for microbatch in (1, 2, 4)
        for attention in ("xla", "cudnn")
        if batch // data % (microbatch * pipe) == 0
    )
    return tuple(run for run in runs if megatron_bytes(run) < USABLE_SHARE * A100.memory)


def _neox() -> Iterable[Row]:
    """GPT-NeoX-20B (2204.06745): 150,000 steps in 1,830 hours, with the repository's configs/20B.yml; 96 A100s of 40 GB."""
    run = make_run(NEOX_20B, (2, 4, 12), 1536, 4, 1, recompute="full", sequence_parallel=False)
    yield _timed("GPT-NeoX-20B", (run,), NEOX_NODES, GPT_NEOX, 1830 * 3600 / 150_000, ZERO_1)


def _megatron_style() -> Iterable[Row]:
    """MT-NLG, with the layout of 2104.04473's 530B; BLOOM; Llama 3 405B at 8,192 tokens, its chunks not printed."""
    old = {"recompute": "full", "sequence_parallel": False}
    for data, seconds in ((8, 60.1), (10, 50.2), (12, 44.4)):
        run = make_run(preset("megatron-529.6b"), (8, 35, data), 1920, 1, 1, **old)
        yield _timed("MT-NLG, 2201.11990", (run,), A100, MEGATRON_DEEPSPEED, seconds, Sharding())
    run = make_run(BLOOM, (4, 12, 8), 2048, 2, 1, **old)
    yield _timed("BLOOM", (run,), JEAN_ZAY, MEGATRON_DEEPSPEED, 105, ZERO_1)
    llama = preset("llama3.1-405b")
    for data, teraflops in ((64, 430), (128, 400)):
        runs = tuple(
            make_run(llama, (8, 16, data), 2048, 1, chunks, schedule="interleaved_1f1b") for chunks in (1, 2, 4, 8)
        )
        yield Row("Llama 3, 2407.21783", runs, H100, META_2024, teraflops, sharding=ZERO_1)


def _fsdp() -> Iterable[Row]:
    """FSDP over all GPUs: MaxText's Llama 2 70B, PAX's GPT-3 175B, and the MPT models at 2,048 tokens on A100s.

    Where the recompute mode is not printed, the modes are candidates; MPT's tables print whether all is recomputed. Those of
    80 GB GPUs are the models of 760M parameters and more, those of 40 GB from 13B. MPT's table of H100s is left out: it
    was measured with a PyTorch from before 2.0, without kernels for Hopper.
    """
    for data, shards, seconds in (
        (64, None, 6.999),
        (128, None, 7.072),
        (256, None, 7.153),
        (512, 128, 7.091),
        (1024, 128, 7.084),
        (2048, 128, 7.066),
    ):
        sharding = Sharding(zero=3, shards=shards)
        yield _timed("MaxText, FSDP", _modes("llama2-70b", data, 2), H100, JAX_FSDP, seconds, sharding)
    for gpu, rate in ((A100, 20.44), (H100, 51.00)):
        yield _timed("PAX, FSDP", _modes("gpt3-175b", 256, 6), gpu, JAX_FSDP, 6 * 256 / rate, FULL_SHARD)
    for name, gpus, microbatch, accumulated, mode, tokens, pure in (
        ("70b", 64, 8, 4, "full", 410, True),
        ("70b", 32, 2, 16, "full", 373, True),
        ("30b", 8, 3, 21, "full", 916, False),
        ("13b", 8, 2, 3, "none", 2262, False),
        ("7b", 8, 6, 2, "none", 4641, False),
        ("3b", 8, 10, 2, "none", 10811, False),
        ("1b", 8, 14, 4, "none", 20513, False),
        ("760m", 8, 24, 2, "none", 32434, False),
    ):
        yield _mpt(A100, name, gpus, microbatch, accumulated, mode, tokens, FSDP_PURE if pure else MPT_FSDP)
    for name, gpus, microbatch, accumulated, tokens in (
        ("70b", 128, 4, 1, 376),
        ("70b", 64, 2, 1, 276),
        ("30b", 128, 6, 1, 865),
        ("30b", 32, 4, 1, 857),
        ("13b", 128, 16, 1, 1972),
        ("13b", 64, 16, 1, 1976),
        ("13b", 32, 14, 1, 1998),
        ("13b", 16, 10, 1, 1993),
        ("13b", 8, 4, 16, 1668),
    ):
        yield _mpt(A100_40GB, name, gpus, microbatch, accumulated, "full", tokens, FSDP_PURE)


def _modes(name: str, data: int, microbatch: int) -> tuple[RunConfig, ...]:
    """One microbatch a step under FSDP, with each recompute mode that fits 80 GB."""
    options = {"attention": "cudnn", "zero": 3, "sequence_parallel": False}
    modes = ("none", "selective", "full")
    model, batch = preset(name), data * microbatch
    runs = [make_run(model, (1, 1, data), batch, microbatch, 1, recompute=mode, **options) for mode in modes]
    return tuple(run for run in runs if sum(bytes_per_device(run).values()) <= USABLE_SHARE * H100.memory)


def _mpt(
    gpu: Gpu, name: str, gpus: int, microbatch: int, accumulated: int, mode: str, tokens: float, software: Software
) -> Row:
    """A row of printed tokens per second and GPU."""
    layers, hidden = MPT[name]
    heads = max(12, hidden // 128)
    model = ModelConfig(
        name=f"mpt-{name}", layers=layers, hidden=hidden, heads=heads, vocabulary=50368, sequence_length=2048
    )
    batch = gpus * microbatch * accumulated
    run = make_run(model, (1, 1, gpus), batch, microbatch, 1, recompute=mode, sequence_parallel=False)
    teraflops = flops_per_step(run) / (batch * 2048) * tokens / 1e12
    return Row("MPT, FSDP", (run,), gpu, software, teraflops, sharding=FULL_SHARD)


def _experts() -> Iterable[Row]:
    """Mixtral 8x7B on 64 H100s and Qwen3-30B-A3B on 8, at 4,096 tokens without dropping; tokens are spread evenly in both.

    Expert groups are neighbours in a host. AutoModel's configuration recomputes blocks. NVIDIA's other tables of sparse
    models on H100s (Megatron Bridge: DeepSeek-V3, Qwen3) are of fp8, or drop tokens.
    """
    options = {"attention": "cudnn", "expert": 8}
    mixtral = dataclasses.replace(preset("mixtral-8x7b"), sequence_length=4096)
    run = make_run(mixtral, (1, 4, 16), 256, 1, 8, zero=1, axis_order=("pipe", "data", "tensor"), **options)
    yield Row("Megatron-Core, MoE", (run,), H100, MEGATRON_MOE, 468, sharding=ZERO_1)
    qwen = dataclasses.replace(preset("qwen3-30b-a3b"), sequence_length=4096)
    run = make_run(qwen, (1, 1, 8), 512, 4, 1, zero=3, recompute="full", sequence_parallel=False, **options)
    yield _timed("AutoModel, MoE", (run,), H100, AUTOMODEL, 21.773, FULL_SHARD)


RECENT_ROWS: tuple[Row, ...] = (
    *_nemo(),
    *_megatron_style(),
    *_megascale(),
    *_neox(),
    *_nemo_context(),
    *_fsdp(),
    *_experts(),
)

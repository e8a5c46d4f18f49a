"""Will it fit, and what does it send? Compiles the real training step for a GPU cluster, on a machine without a GPU.

python -m megajax.plan.dryrun --model gpt3-1t --gpu h100-80gb --data 6 --pipe 64 --tensor 8 --global-batch-size 3072
python -m megajax.plan.dryrun --config plan.toml --gpu a100-80gb

Options are those of experiments.gpt3 (its --help lists them), and

  --gpu NAME        the GPUs of the cluster: {gpus}
  --cluster FILE    instead: a cluster's TOML file, with its links, and the rates that --calibrate measured
  --import FILE.py  a Python file or module to import first, which registers schedules or models (repeatable)
  --run FILE.py     a Python file or module with a RunConfig called RUN, of any model, instead of these options
  --json            print the compiled program's figures as a JSON object instead of the report
  --save-hlo FILE   keep the optimized program; its op names have the scopes F, B, I, W, embed, head, embed_backward, send
  --model-only      do not compile: the memory model's numbers, as without XLA's CUDA plugin
  --timeout COUNT   seconds the compiler may take (default: 900)

Exit code 0 if it fits, 1 if not (with the smallest change that makes it fit), if the compiler refuses the program or if its
collectives would deadlock, 2 for invalid options.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Collection, Sequence
from typing import Any

import jax

from megajax.config import ConfigError, RunConfig
from megajax.config.cli import parse
from megajax.config.layer_kinds import layer_kinds
from megajax.config.options import Parser
from megajax.estimate import model_costs
from megajax.estimate.auto import resolved
from megajax.estimate.collective_order import check
from megajax.estimate.flops import causal_flops_per_step, flops_per_step, hardware_flops_per_step
from megajax.estimate.gpus import GPUS, Gpu, find_gpu
from megajax.estimate.hlo import Collective, loop_trip_counts, most_sent, read
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.program_account import account_of, ragged_part, routed_part
from megajax.ops.attention_choice import cudnn_installed
from megajax.plan.account import account_table, to_json
from megajax.plan.cluster import load_cluster
from megajax.plan.compiler import (
    MISSING_PLUGIN,
    CompilerError,
    CompilerTimeout,
    check_vendor,
    compile_for,
    has_compiler,
)
from megajax.plan.explain import folded
from megajax.plan.report import LEGEND, memory_bar, shown_parameters
from megajax.plan.search import usable_bytes
from megajax.plan.suggest import smallest_change
from megajax.runtime.compat_kernels import tokamax_installed
from megajax.schedules.arguments import number, plain_text
from megajax.schedules.errors import command
from megajax.schedules.paths import local_path, tell_replaced
from megajax.schedules.registry import import_user_files

LARGEST = 8  # buffers to list
# The library of each fused attention, and how it is installed where programs are only compiled.
LIBRARIES = {
    "cudnn": ("the cuDNN library", "pip install nvidia-cudnn-cu12, 700 MB"),
    "tokamax": ("tokamax", "pip install 'megajax[dryrun]' on Python 3.12 or later"),
}


@command
def main(arguments: Sequence[str] | None) -> int:
    """Runs the dry run; returns 1 if the run does not fit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or "--help" in words or "-h" in words:
        print(__doc__.format(gpus=", ".join(GPUS)).strip())
        return 0
    own, rest = _own(words)
    run = _run_of_file(own, rest) if own.run else _run_of_options(own, rest)
    run.validate()
    gpu = load_cluster(own.cluster).gpu if own.cluster else find_gpu(own.gpu)
    run = resolved(run, gpu)
    if own.json:
        return print_json(run, gpu, own.save_hlo, own.timeout)
    return dry_run(run, gpu, compiling=not own.model_only, timeout=own.timeout, save_hlo=own.save_hlo)


def _run_of_options(own: argparse.Namespace, rest: Sequence[str]) -> RunConfig:
    """The run that the options of experiments.gpt3 describe."""
    import_user_files(own.imports)
    request = parse(rest, __doc__, {})
    if request.model is None:
        raise ConfigError("model is not given: pass --model NAME, a preset, or --config FILE.")
    run = request.run(request.devices_needed or 1, "bf16")
    return dataclasses.replace(run, imports=tuple(dict.fromkeys((*own.imports, *run.imports))))


def _run_of_file(own: argparse.Namespace, rest: Sequence[str]) -> RunConfig:
    """The RunConfig called RUN in a user's file, which the compiler's process imports too."""
    if rest:
        raise ConfigError(f"{' '.join(rest)} cannot be combined with --run {own.run}: change RUN in the file.")
    imports = (*own.imports, own.run)
    import_user_files(own.imports)
    import_user_files([own.run], "--run")
    path = os.path.realpath(own.run)
    modules = (module for module in sys.modules.values() if getattr(module, "__file__", None) == path)
    run = getattr(sys.modules.get(own.run) or next(modules, None), "RUN", None)
    if not isinstance(run, RunConfig):
        raise ConfigError(
            f"run = {own.run} has no RunConfig called RUN: define RUN = RunConfig(model, parallel, train)."
        )
    return dataclasses.replace(run, imports=(*imports, *run.imports))


def dry_run(
    run: RunConfig, gpu: Gpu, *, compiling: bool = True, timeout: float = 900, save_hlo: str | None = None
) -> int:
    """Compiles, prints the report, and returns the exit code; no option of the run is auto (`resolved`)."""
    if compiling:
        check_vendor(gpu)
    modelled = bytes_per_device(run)  # raises for sizes that the schedule's generator refuses
    print(_title(run, gpu))
    for remark in run.parallel.stage_layers(run.model.layers, kinds=layer_kinds(run.model)).remarks:
        print(remark)
    compiling_here, keep = compiling and has_compiler(), ()
    if compiling_here and (instead := _with_installed_attention(run)) is not run:
        fused, keep = sum(modelled.values()), ("attention",)
        library, install = LIBRARIES[run.parallel.attention]
        run, modelled = instead, bytes_per_device(instead)
        print(
            f"attention: on GPUs with {library} its fused attention runs; it is not installed here ({install}), so the "
            f"program is compiled with XLA's attention: {(sum(modelled.values()) - fused) / 1e9:.1f} GB more, by the "
            "memory model"
        )
    if not compiling_here:
        if compiling:
            print(f"NOT COMPILED: {MISSING_PLUGIN}.")
        print("These are the MEMORY MODEL's figures, not the compiler's (docs/planning.md compares the two).")
        peak = sum(modelled.values())
        print(_memory(modelled, peak, gpu))
        return _verdict(run, gpu, peak, 1.0, "model", 0, keep)
    try:
        result = _compiled(run, gpu, timeout, save_hlo)
    except CompilerError as error:
        print(f"NOT COMPILED: {error}")
        stopped, same = isinstance(error, CompilerTimeout), "The program would fail on the cluster in the same way"
        print("Pass --timeout with more seconds" if stopped else same, "By the memory model:", sep=". ")
        print(_memory(modelled, sum(modelled.values()), gpu))
        return 1
    peak = result["memory"]["peak"]
    print(_memory(_parts(modelled, result), peak, gpu))
    print("largest temporaries (XLA's shapes on one GPU; arrays on one line share memory at different times):")
    for size, shapes in result["buffers"][:LARGEST]:
        print(f"  {size / 1e9:7.3f} GB  {shapes[:100]}")
    print(_communication(run, result))
    account = account_of(run, gpu, result["hlo"])
    print(account_table(account))
    print(_utilisation(run, gpu, account.seconds))
    order = check(result["hlo"])
    print(order)
    print(f"compiled in {result['seconds']:.0f} s; nothing was run or autotuned")
    fits = _verdict(run, gpu, peak, peak / sum(modelled.values()), "compiler", timeout, keep)
    return 1 if order.faults else fits


def print_json(run: RunConfig, gpu: Gpu, save_hlo: str | None, timeout: float) -> int:
    """Compiles and prints memory, times and traffic as one JSON object; returns the exit code."""
    run = _with_installed_attention(run)
    try:
        result = _compiled(run, gpu, timeout, save_hlo)
    except CompilerError as error:
        raise ConfigError(f"not compiled: {error}") from error
    order = check(result["hlo"])
    figures = {
        "gpu": gpu.name,
        "attention": run.parallel.attention,
        "compile_seconds": result["seconds"],
        "memory": result["memory"],
        "fits": result["memory"]["peak"] <= usable_bytes(gpu),
        "collective_order": {"consistent": order.consistent, **dataclasses.asdict(order)},
        **to_json(account_of(run, gpu, result["hlo"])),
    }
    print(json.dumps(figures, indent=1))
    return 0 if figures["fits"] and not order.faults else 1


def _compiled(run: RunConfig, gpu: Gpu, timeout: float, save_hlo: str | None) -> dict[str, Any]:
    """What the compiler answers; its program is also written to a file."""
    result = compile_for(run, gpu, timeout)
    if save_hlo is not None:
        try:
            tell_replaced(save_hlo)
            pathlib.Path(save_hlo).write_text(result["hlo"])
        except OSError as error:
            raise ConfigError(f"cannot write {save_hlo}: {error.strerror}; pass --save-hlo a writable path") from error
    return result


def _with_installed_attention(run: RunConfig) -> RunConfig:
    """The run with XLA's attention in place of a fused one whose library is not installed here."""
    installed = {"cudnn": cudnn_installed, "tokamax": tokamax_installed}
    return run if installed.get(run.parallel.attention, lambda: True)() else run.with_layout(attention="xla")


def _own(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(add_help=False)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", type=plain_text)
    where.add_argument("--cluster", type=local_path)
    parser.add_argument("--import", action="append", default=[], dest="imports", type=local_path)
    parser.add_argument("--run", type=local_path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save-hlo", type=local_path)
    parser.add_argument("--model-only", action="store_true")
    parser.add_argument("--timeout", type=number(below=10**8), default=900)
    return parser.parse_known_args(words)


def _title(run: RunConfig, gpu: Gpu) -> str:
    parallel = run.parallel
    context = f"context {parallel.context} ({parallel.context_exchange}) x " if parallel.context > 1 else ""
    degree = f"expert {parallel.expert}{folded(parallel)}"
    experts = f" ({degree}, dispatch {parallel.expert_dispatch})" if parallel.expert > 1 else ""
    return (
        f"{run.model.name}: {shown_parameters(run.model)} on data {parallel.data}{experts} x {context}pipe "
        f"{parallel.pipe} x tensor {parallel.tensor} = {parallel.devices} {gpu.name}; {parallel.schedule}, "
        f"{parallel.chunks} chunks, {run.microbatches} microbatches of {parallel.microbatch_size}, recompute "
        f"{parallel.recompute}, attention {parallel.attention}, {run.train.precision}"
    )


def _parts(modelled: dict[str, int], result: dict[str, Any]) -> dict[str, int]:
    """The compiled peak by part.

    Arguments are exact. Of the temporaries only the sum is XLA's; the parts are the memory model's, and the difference is
    added to the workspace, which is the least certain part.
    """
    arguments = result["arguments"]
    parts = modelled | {"weights": arguments["weights"], "optimizer": arguments["optimizer"]}
    rest = result["memory"]["peak"] - sum(parts.values())
    return parts | {"workspace": max(0, parts["workspace"] + rest)}


def _memory(parts: dict[str, int], peak: int, gpu: Gpu) -> str:
    limit = usable_bytes(gpu)
    lines = [
        f"memory: {peak / 1e9:.2f} GB at the peak on the GPU with most, of {gpu.memory / 1e9:.1f}, of which "
        f"{limit / 1e9:.1f} are assumed to be usable",
        f"  [{memory_bar(parts, limit, 64)}]",
        "  " + ", ".join(f"{name} {count / 1e9:.2f}" for name, count in parts.items() if count),
        f"  {LEGEND}",
    ]
    return "\n".join(lines)


def _communication(run: RunConfig, result: dict[str, Any]) -> str:
    """Bytes sent by axis, and FLOPs."""
    parallel, module = run.parallel, read(result["hlo"], loop_trip_counts(run), ragged_part(run))
    mesh = tuple(parallel.mesh_sizes.values())
    rows: dict[tuple[str, str], list[Collective]] = {}
    for collective in module.collectives:
        rows.setdefault((" and ".join(collective.axes(mesh)) or "none", collective.kind), []).append(collective)
    lines = [
        "communication of one GPU in a step, by ring algorithms:",
        f"  {'axis':<18} {'kind':<19}{'calls':>10}{'GB':>11}",
    ]
    lines += [
        f"  {axis:<18} {kind:<19}{sum(one.times for one in found):>10,.0f}{most_sent(found) / 1e9:>11.3f}"
        for (axis, kind), found in sorted(rows.items())
    ]
    useful, needed = flops_per_step(run) / parallel.devices, hardware_flops_per_step(run) / parallel.devices
    compiled = module.flops(routed_part=routed_part(run))
    lines.append(
        f"FLOPs of one GPU in a step: {compiled:.3e} compiled (the last rank's); "
        f"{needed:.3e} with recomputation, {useful:.3e} of the model"
    )
    if model_costs(run.model).experts:
        lines.append(
            f"  of experts: those of balanced routing, {routed_part(run):.0%} of the rows that a device has room for"
        )
    return "\n".join(lines)


def _utilisation(run: RunConfig, gpu: Gpu, seconds: float) -> str:
    """FLOP/s and MFU of a step; beside it with half of causal attention's scores, as some other programs count."""
    flops, causal = flops_per_step(run), causal_flops_per_step(run)
    rate = flops / seconds / run.parallel.devices
    share = rate / gpu.peak(run.train.precision)
    half = f" ({share * causal / flops:.1%} with attention's causal half)" if causal < flops else ""
    return f"that is {rate / 1e12:.0f} TFLOP/s of the model's FLOPs on each GPU: {share:.1%} MFU{half}"


def _verdict(
    run: RunConfig, gpu: Gpu, peak: int, correction: float, source: str, timeout: float, keep: Collection[str]
) -> int:
    """Prints whether the run fits, and if not the smallest change that makes it fit; returns the exit code.

    Args:
      peak: bytes.
      correction: ratio of the compiled peak to the memory model's, a factor on the model's numbers for other runs.
      source: of the peak, "model" or "compiler".
      timeout: seconds, for compiling the changed run.
      keep: fields of the layout that the change must not touch.
    """
    limit = usable_bytes(gpu)
    if peak <= limit:
        print(f"fits: {(limit - peak) / 1e9:.1f} GB to spare, by the {source}")
        return 0
    print(f"DOES NOT FIT: {(peak - limit) / 1e9:.1f} GB too much, by the {source}")
    found = smallest_change(run, gpu, correction, keep)
    if found is None:
        print("no option of the layout, nor two of them, makes it fit, on up to 16 times the GPUs")
        return 1
    print(
        f"the smallest change that makes it fit: {found.options}  ({found.peak / 1e9:.1f} GB by the model, {found.cost})"
    )
    if source == "compiler":
        try:
            compiled = compile_for(found.run, gpu, timeout)["memory"]["peak"]
            print(f"  compiled too: {compiled / 1e9:.2f} GB, {'fits' if compiled <= limit else 'does not fit either'}")
        except CompilerError as error:
            print(f"  but {error}")
    return 1


if __name__ == "__main__":
    # No GPU is used; without one, the CUDA plugin prints errors when jax starts.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())

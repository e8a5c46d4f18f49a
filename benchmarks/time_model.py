"""The time model compared with the roofline of compiled programs: layouts of six models, compiled for H100s without any.

python -m benchmarks.time_model                compiles all (about 40 minutes on one core) and writes
                                               benchmarks/results/time_model.json
python -m benchmarks.time_model --case NAME    compiles these and prints their errors; writes nothing
python -m benchmarks.time_model --missing      compiles those that the file does not have yet
python -m benchmarks.time_model --show         compares the models with the file; compiles nothing

A row is a step of a rank that computes all of its microbatches, compiled and by the model (`estimate/program_time.py`), by
class and in all. The bubble is not in the compiled program: both add the schedule's, with a backward of twice the forward's
time, and with the model's own times of operations. The last columns are the peak of the memory. Needs pip install
"megajax[dryrun]" and nvidia-cudnn-cu12. Nothing is run.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import roofline
from benchmarks.memory_model import summary
from megajax.config.options import Parser
from megajax.plan.compiler import compiler_versions
from megajax.schedules.errors import exit_code

RESULTS = pathlib.Path(__file__).parent / "results" / "time_model.json"
GPU = "h100-80gb"
_175B, _1T, _405B = "--model gpt3-175b --tensor 8", "--model gpt3-1t --tensor 8", "--model llama3.1-405b --tensor 8"
CASES = {
    "175b": f"{_175B} --pipe 8 --chunks 3 --global-batch-size 64",
    "175b-vocab-tensor": f"{_175B} --pipe 8 --chunks 3 --vocab-parallel tensor --global-batch-size 64",
    "175b-1f1b": f"{_175B} --pipe 8 --schedule 1f1b --global-batch-size 64",
    "175b-zb_v": f"{_175B} --pipe 8 --schedule zb_v --chunks 2 --global-batch-size 64",
    "175b-full": f"{_175B} --pipe 8 --schedule eager_1f1b --recompute full --global-batch-size 64",
    "175b-zero1": f"{_175B} --pipe 4 --data 4 --zero 1 --chunks 2 --global-batch-size 128",
    "175b-t4": "--model gpt3-175b --tensor 4 --pipe 32 --chunks 3 --vocab-parallel tensor --global-batch-size 64",
    "1t": f"{_1T} --pipe 64 --chunks 2 --global-batch-size 128",
    "1t-1f1b": f"{_1T} --pipe 64 --schedule 1f1b --global-batch-size 256",
    "405b": f"{_405B} --pipe 16 --chunks 4 --data 8 --zero 1 --global-batch-size 512",
    "llama2-7b": "--model llama2-7b --tensor 2 --pipe 2 --data 2 --schedule eager_1f1b --global-batch-size 64",
    "llama2-7b-1f1b": "--model llama2-7b --tensor 2 --pipe 4 --schedule 1f1b --global-batch-size 32",
    "llama2-7b-tensor": "--model llama2-7b --tensor 8 --global-batch-size 16",
    "llama2-7b-zero1": "--model llama2-7b --layers 8 --data 8 --zero 1 --microbatch-size 2 --global-batch-size 64",
    "llama2-7b-zero3": "--model llama2-7b --data 8 --zero 3 --global-batch-size 64",
    "llama2-7b-context": "--model llama2-7b --context 4 --tensor 2 --zero 1 --sequence-length 16384 --global-batch-size 8",
    "llama2-7b-context-pipe": "--model llama2-7b --context 2 --pipe 2 --tensor 2 --chunks 2 --sequence-length 8192 "
    "--global-batch-size 16",
    "llama2-7b-offload": "--model llama2-7b --tensor 2 --pipe 2 --schedule 1f1b --recompute full --offload-activations "
    "--global-batch-size 32",
    "llama2-7b-one-block": "--model llama2-7b --pipe 8 --chunks 4 --attention xla --microbatch-size 2 "
    "--global-batch-size 32",
    "llama3-8b-chunks": "--model llama3-8b --tensor 2 --pipe 2 --chunks 2 --global-batch-size 32",
    "llama3-8b-vocab-tensor": "--model llama3-8b --tensor 2 --pipe 4 --chunks 2 --vocab-parallel tensor "
    "--global-batch-size 32",
    "llama3-8b-zero3": "--model llama3-8b --tensor 2 --data 4 --zero 3 --global-batch-size 32",
    "llama3-8b-context": "--model llama3-8b --context 4 --tensor 2 --data 2 --zero 1 --sequence-length 32768 "
    "--global-batch-size 4",
    "13b-1f1b": "--model gpt3-13b --tensor 2 --pipe 4 --data 2 --zero 1 --schedule 1f1b --microbatch-size 2 "
    "--global-batch-size 128",
    "13b-zb_h1": "--model gpt3-13b --tensor 4 --pipe 4 --schedule zb_h1 --global-batch-size 32",
    "13b-gpipe": "--model gpt3-13b --tensor 4 --pipe 4 --schedule gpipe --recompute full --global-batch-size 32",
    "13b-none": "--model gpt3-13b --tensor 4 --pipe 2 --chunks 2 --recompute none --microbatch-size 2 "
    "--global-batch-size 64",
    "13b-xla": "--model gpt3-13b --tensor 8 --pipe 2 --chunks 2 --attention xla --global-batch-size 32",
    "6.7b-pipe": "--model gpt3-6.7b --pipe 4 --chunks 2 --microbatch-size 2 --global-batch-size 64",
    "6.7b-1f1b": "--model gpt3-6.7b --pipe 8 --schedule 1f1b --microbatch-size 2 --global-batch-size 64",
    "6.7b-zb_h1": "--model gpt3-6.7b --pipe 4 --schedule zb_h1 --microbatch-size 2 --global-batch-size 64",
    "6.7b-fp8": "--model gpt3-6.7b --tensor 2 --pipe 2 --matmul-dtype fp8 --global-batch-size 32",
    "6.7b-ring": "--model gpt3-6.7b --tensor 4 --pipe 2 --chunks 2 --tensor-overlap ring --global-batch-size 32",
    "175b-ring": "--model gpt3-175b --tensor 8 --pipe 8 --chunks 3 --tensor-overlap ring --global-batch-size 64",
    "llama2-7b-ring": "--model llama2-7b --tensor 2 --pipe 2 --data 2 --tensor-overlap ring --global-batch-size 64",
    "one-gpu": roofline.CASES["one-gpu"],
}


def measure(name: str) -> dict[str, Any]:
    """Compiles a case; a row of the results.

    Raises:
      ConfigError: the compiler is not installed, or the step does not compile.
    """
    _, result, found = roofline.compiled(CASES[name].split(), GPU)
    return row(name, result, found)


def row(name: str, result: dict[str, Any], found: Any) -> dict[str, Any]:
    """The row of a case from what `roofline.compiled` returns."""
    seconds = {kind: round(value, 6) for kind, value in found.account.seconds.items()}
    hidden, exposed = (round(sum(part.values()), 6) for part in (found.account.hidden, found.account.exposed))
    return {
        "name": name,
        "words": CASES[name],
        "seconds": seconds,
        "bubble": found.bubble,
        "collectives": {"hidden": hidden, "exposed": exposed},
        "peak": result["memory"]["peak"],
        "compilation": round(result["seconds"]),
    }


def compare(one: dict[str, Any]) -> dict[str, Any]:
    """A row with the models' figures.

    Returns:
      "classes": (compiled, modelled) seconds of matmuls, attention, other kernels, exposed communication, gaps, waits;
      "step": (compiled, modelled) seconds without the bubble; "bubble": both, relative to these; "peak": both, in bytes.
    """
    from megajax.config.cli import parse
    from megajax.estimate.gpus import find_gpu, with_attention
    from megajax.estimate.memory import bytes_per_device
    from megajax.estimate.program_time import Program
    from megajax.estimate.roofline import EXPOSED, GAPS, SYNCS
    from megajax.estimate.step_time import step_time

    gpu, request = find_gpu(GPU), parse(one["words"].split(), __doc__, {})
    run = with_attention(request.run(request.devices_needed or 1, "bf16"), gpu)
    parts, seconds = Program(run, gpu).parts, one["seconds"]
    kernels = ("elementwise", "copy", "stash", "accumulation")
    exposed = parts.tensor + parts.context + parts.pipe + parts.data + parts.offload
    classes = {
        "matmul": (seconds["matmul"], parts.matmul),
        "attention": (seconds.get("attention", 0.0), parts.attention),
        "others": (sum(seconds.get(name, 0.0) for name in kernels), parts.traffic),
        "exposed": (seconds.get(EXPOSED, 0.0), exposed),
        "gaps": (seconds[GAPS], parts.gaps),
        "waits": (seconds.get(SYNCS, 0.0), parts.waits),
    }
    return {
        "classes": classes,
        "step": (sum(seconds.values()), parts.total),
        "bubble": (one["bubble"], step_time(run, gpu).bubble / parts.total),
        "peak": (one["peak"], sum(bytes_per_device(run).values())),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows, compiled/modelled in ms, and the errors of time and memory."""
    times, peaks = [], []
    for one in rows:
        found = compare(one)
        if not times:
            names = "".join(f"{name:>16}" for name in found["classes"])
            print(f"{'ms, compiled/modelled':<23}{names}{'step':>18}{'error':>7}{'bubble':>12}{'GB':>11}{'error':>7}")
        errors = [modelled / compiled - 1 for compiled, modelled in (found["step"], found["peak"])]
        classes = "".join(f"{f'{1e3 * a:.1f}/{1e3 * b:.1f}':>16}" for a, b in found["classes"].values())
        step, peak = (
            f"{scale * a:.1f}/{scale * b:.1f}" for scale, (a, b) in ((1e3, found["step"]), (1e-9, found["peak"]))
        )
        bubble = "/".join(f"{share:.1%}" for share in found["bubble"])
        print(f"{one['name']:<23}{classes}{step:>18}{errors[0]:>+7.1%}{bubble:>12}{peak:>11}{errors[1]:>+7.1%}")
        times.append(abs(errors[0]))
        peaks.append(abs(errors[1]))
    for name, some in (("time", times), ("memory", peaks)):
        print(summary(name, some))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid options or a program that does not compile."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="one of the layouts; writes nothing")
    parser.add_argument("--show", action="store_true", help="compare the models with the existing results")
    parser.add_argument("--missing", action="store_true", help="compile only the layouts that the results do not have")

    def command() -> None:
        options = parser.parse_args(arguments)
        if options.show:
            known = json.loads(RESULTS.read_text())["rows"]
            return show([one for one in known if one["name"] in (options.case or CASES)])
        if options.case:
            return show([measure(name) for name in options.case])
        known = {one["name"]: one for one in json.loads(RESULTS.read_text())["rows"]} if options.missing else {}
        for name in CASES:
            if name not in known:
                known[name] = measure(name)
                write([known[one] for one in CASES if one in known])
        return show([known[name] for name in CASES])

    return exit_code(command)


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Writes the results, with the versions that compiled them."""
    results = {"command": "python -m benchmarks.time_model", "gpu": GPU, "versions": compiler_versions()}
    lines = ",\n".join(f" {json.dumps(one)}" for one in rows)
    RESULTS.write_text(json.dumps(results)[:-1] + f', "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    raise SystemExit(main())

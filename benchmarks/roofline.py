"""Estimated time and memory traffic of the compiled step by class of kernel, for a few runs on H100s.

python -m benchmarks.roofline
python -m benchmarks.roofline --case llama2-7b --gpu h200-141gb

Compiles each step for the GPUs of a cluster, on a machine without any (megajax[dryrun], and nvidia-cudnn-cu12 for the fused
attention that runs on GPUs), and prints the dry run's account of it. Nothing is run. The step of one-gpu is compared with
one that is written by hand in plain JAX (`benchmarks.plain_step`).
"""

import argparse
import sys
from collections.abc import Sequence

from megajax.config import ConfigError
from megajax.config.options import Parser
from megajax.schedules.errors import exit_code

# docs/planning.md quotes some of them.
CASES = {
    "gpt3-175b": "--model gpt3-175b --tensor 8 --pipe 8 --chunks 3 --global-batch-size 64",
    "gpt3-175b-xla": "--model gpt3-175b --tensor 8 --pipe 8 --chunks 3 --global-batch-size 64 --latency-estimates xla",
    "gpt3-175b-roofline": "--model gpt3-175b --tensor 8 --pipe 8 --chunks 3 --global-batch-size 64 "
    "--latency-estimates roofline",
    "gpt3-175b-1f1b": "--model gpt3-175b --tensor 8 --pipe 8 --schedule 1f1b --global-batch-size 64",
    "gpt3-175b-zb_v": "--model gpt3-175b --tensor 8 --pipe 8 --schedule zb_v --chunks 2 --global-batch-size 64",
    "llama2-7b": "--model llama2-7b --tensor 2 --pipe 2 --data 2 --chunks 1 --schedule eager_1f1b --microbatch-size 1 "
    "--global-batch-size 64",
    "one-gpu": "--model gpt2-xl --layers 8 --hidden 4096 --heads 32 --sequence-length 2048 --dropout 0 "
    "--microbatch-size 4 --global-batch-size 16",
    "zb_v-short": "--model gpt3-175b --tensor 8 --pipe 8 --schedule zb_v --chunks 2 --global-batch-size 16",
    "interleaved-short": "--model gpt3-175b --tensor 8 --pipe 8 --chunks 2 --global-batch-size 16",
}

PLAIN_STEP = "benchmarks.plain_step.PlainStep"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the accounts; returns the exit code: 0, or 2 for invalid options or a program that does not compile."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="one of the runs (default: all)")
    parser.add_argument("--gpu", default="h100-80gb", help="GPU to compile for (default: %(default)s)")

    def command() -> None:
        options = parser.parse_args(arguments)
        for name in options.case or CASES:
            plain = PLAIN_STEP if name == "one-gpu" else None
            print(f"{name}: {CASES[name]}\n{report(CASES[name].split(), options.gpu, plain)}\n", flush=True)

    return exit_code(command)


def compiled(words: Sequence[str], gpu_name: str, **options):
    """(the run, what `compile_for` returns for its step, the step's account); `options` as in `compile_for`.

    Raises:
      ConfigError: for an unknown GPU, or a step that does not compile.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # no GPU is used
    from megajax.config.cli import parse
    from megajax.estimate.expert_time import with_expert_dispatch
    from megajax.estimate.gpus import find_gpu, with_attention
    from megajax.estimate.vocabulary import with_vocabulary
    from megajax.plan.compiler import CompilerError

    request, gpu = parse(words, __doc__, {}), find_gpu(gpu_name)
    run = with_expert_dispatch(request.run(request.devices_needed or 1, "bf16"), gpu)
    run = with_attention(with_vocabulary(run, gpu), gpu)
    run.validate()
    try:
        return run, *compile_and_account(run, gpu, **options)
    except CompilerError as error:
        raise ConfigError(str(error)) from error


def compile_and_account(run, gpu, **options):
    """(what `compile_for` returns for a run's step, the step's account); `options` and errors as of `compile_for`."""
    from megajax.estimate.program_account import account_of
    from megajax.plan.compiler import compile_for

    result = compile_for(run, gpu, **options)
    return result, account_of(run, gpu, result["hlo"])


def report(words: Sequence[str], gpu_name: str, other: str | None = None) -> str:
    """The account of one run, its compile time and its peak memory; raises as `compiled`.

    Args:
      words: the run's options.
      gpu_name: the GPU.
      other: another step of the same model to compare with, as `compile_for` takes it. It is compiled with XLA's default
        flags, as one that is written by hand is, and with those that megajax sets.
    """
    run, result, found = compiled(words, gpu_name)
    from megajax.plan.account import account_table

    lines = [f"attention {run.parallel.attention}; {_compilation(result)}", account_table(found)]
    for flags in (False, True) if other else ():
        _, result, theirs = compiled(words, gpu_name, training=other, training_flags=flags)
        name = f"{other} with {'the XLA flags of megajax' if flags else 'the defaults of XLA'}"
        lines += [f"{name}: {_compilation(result)}", account_table(theirs)]
        lines.append(f"megajax's step takes {found.seconds / theirs.seconds:.3f} of the time of {name}")
    return "\n".join(lines)


def _compilation(result) -> str:
    return f"compiled in {result['seconds']:.0f} s; {result['memory']['peak'] / 1e9:.2f} GB at the peak"


if __name__ == "__main__":
    sys.exit(main())

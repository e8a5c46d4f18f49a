"""Weights of Hugging Face in and out: GPT-2, Llama (SmolLM2), Mistral, Mixtral, Qwen2, Qwen3 (with experts too), OLMoE and
BERT; those of GGUF files in.

python -m megajax.interop.hugging_face import DIR --run-dir RUN      a run directory with a checkpoint of step 0
python -m megajax.interop.hugging_face import ORG/NAME --run-dir RUN      likewise, of a model on the Hub
python -m megajax.interop.hugging_face import FILE.gguf --run-dir RUN     likewise (needs megajax[gguf])
python -m experiments.gpt3 --config RUN/config.toml --resume auto    trains from it, on any mesh and schedule
python -m megajax.interop.hugging_face export RUN --out DIR          config.json, safetensors and the tokenizer's files

Both read and write part by part, and with several processes (--coordinator, or a launcher) each its own share.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Sequence

from megajax.checkpoint.object_store import place
from megajax.config import LaunchConfig
from megajax.config.options import Parser, add_options
from megajax.data.hub import local_directory
from megajax.interop.import_command import add_import_options, imported, run_command
from megajax.schedules.arguments import whole
from megajax.schedules.paths import local_path, store_path

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Imports or exports; returns the process's exit code, 2 for a user's mistake."""
    return run_command(
        _parser(), arguments, lambda options: (_import if options.command == "import" else _export)(options)
    )


def _import(options: argparse.Namespace) -> str:
    from megajax.interop.hugging_face.read_model import import_run

    run_dir = pathlib.Path(options.run_dir)
    source = pathlib.Path(local_directory(options.directory, "import"))
    given = options.sequence_length, options.tokenizer, options.end_of_document, options.mtp_num_layers
    run = import_run(source, run_dir, *given)
    return imported(run, run_dir)


def _export(options: argparse.Namespace) -> str:
    from megajax.interop.hugging_face.export import export_run

    out = place(options.out)
    size = export_run(
        *(place(options.run), out, options.step, options.dtype, options.max_shard_size),
        ema=options.ema,
        peft=options.peft,
    )
    if options.peft:
        return f"{out}: adapters of {size['family']}, {size['step']}, {size['tensors']} tensors"
    return f"{out}: {size['family']}, {size['step']}, {size['dtype']}, {size['files']} safetensors file(s)"


def _bytes(word: str) -> int:
    """5GB, 500MB, 2GiB."""
    found = re.fullmatch(r"(\d{1,12})\s*([KMG]I?B)?", word.strip(), re.IGNORECASE)
    if not found or int(found[1]) == 0:
        raise argparse.ArgumentTypeError("must be a size such as 5GB or 500MB")
    return int(found[1]) * UNITS[(found[2] or "").upper()]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megajax.interop.hugging_face",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export", parser_class=Parser)
    add = commands.add_parser("import", help="Hugging Face or GGUF to a run directory", allow_abbrev=False)
    add.add_argument("directory", metavar="DIR|ORG/NAME|FILE.gguf", type=local_path, help="config.json and safetensors")
    add_import_options(add, "the most that it has")
    further = "modules of multi-token prediction to import, of those that it has (default: 0)"
    add.add_argument("--mtp-num-layers", metavar="COUNT", type=whole(low=0), default=0, help=further)
    add = commands.add_parser("export", help="a run's checkpoint to a directory of Hugging Face", allow_abbrev=False)
    add.add_argument("run", metavar="RUN", type=store_path, help="the run directory")
    add.add_argument("--out", metavar="DIR", type=store_path, required=True, help="the directory to write")
    add.add_argument("--step", metavar="STEP", type=whole(low=0), help="of the checkpoint (default: the newest)")
    add.add_argument("--ema", action="store_true", help="the averaged weights, of a run with --ema-decay")
    add.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights (default: the source's, or fp32)"
    )
    add.add_argument(
        "--max-shard-size", metavar="SIZE", type=_bytes, default=5 * 10**9, help="of a file (default: 5GB)"
    )
    add.add_argument(
        "--peft", action="store_true", help="the adapters alone, as PEFT's files (default: merged weights)"
    )
    add_options(add, LaunchConfig, "several processes")
    return parser


if __name__ == "__main__":
    sys.exit(main())

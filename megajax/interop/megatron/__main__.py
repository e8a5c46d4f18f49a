"""Weights of Megatron-LM's checkpoints in: GPTs of --ckpt-format torch_dist, and of torch with one file a rank.

python -m megajax.interop.megatron import SAVE --run-dir RUN --tokenizer gpt2   a run directory with a checkpoint of step 0
python -m experiments.gpt3 --config RUN/config.toml --resume auto               trains from it, on any mesh and schedule
python -m megajax.interop.hugging_face export RUN --out DIR                     GPT-2- and Llama-like models for transformers

SAVE is the directory of --save; the weights of any layout are merged, without CUDA and Megatron-LM, but with torch (pip
install "megajax[megatron]"). The optimizer's state is not read. The checkpoint does not have the number of tokens before
padding: it is the tokenizer's, or --vocabulary.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from megajax.config import ConfigError, DataConfig, RunConfig
from megajax.config.options import Parser
from megajax.data.tokenizers import load_tokenizer
from megajax.interop.hugging_face.config import tokenizer_options
from megajax.interop.hugging_face.keys import Keys
from megajax.interop.import_command import add_import_options, imported, run_command
from megajax.interop.megatron.config import added_biases, is_zero_centred, model_of, padded_rows
from megajax.schedules.arguments import plain_text, whole
from megajax.schedules.paths import local_path

__all__ = ["import_checkpoint", "main"]

TOKENS = "embedding.word_embeddings.weight"


def main(arguments: Sequence[str] | None = None) -> int:
    """Imports; returns the process's exit code, 2 for a user's mistake."""
    return run_command(_parser(), arguments, _import)


def _import(options: argparse.Namespace) -> str:
    run_dir = pathlib.Path(options.run_dir)
    data = DataConfig(tokenizer=options.tokenizer or "", end_of_document=options.end_of_document)
    run = import_checkpoint(
        pathlib.Path(options.directory), run_dir, data, options.sequence_length, options.vocabulary, options.step
    )
    return f"the weights only, not the optimizer's state\n{imported(run, run_dir)}"


def import_checkpoint(
    directory: pathlib.Path,
    run_dir: pathlib.Path,
    data: DataConfig,
    sequence_length: int | None = None,
    vocabulary: int | None = None,
    iteration: str | None = None,
) -> RunConfig:
    """Writes the run directory; nothing of it is there before it is complete. All processes call it.

    Args:
      directory: of Megatron-LM's --save, or of one iteration.
      run_dir: to write; it must not exist, or be empty.
      data: with the tokenizer; without one, that of the checkpoint.
      sequence_length: of the run; None: the checkpoint's.
      vocabulary: tokens without padding; None: the tokenizer's.
      iteration: a number, or "release"; None: the last one.

    Raises:
      ConfigError: the checkpoint is damaged or of a model that megajax does not have, or the run cannot be written.
    """
    from megajax.interop.hugging_face.read_model import Source, write_run
    from megajax.interop.megatron.checkpoint import open_checkpoint
    from megajax.interop.megatron.tensors import for_model, zero_centred

    found = open_checkpoint(directory, iteration)
    if not data.tokenizer:
        data = DataConfig(**_own_tokenizer(found.path, found.args))
    if TOKENS not in found.tensors:
        raise ConfigError(f"{found.path} has no {TOKENS}: give a checkpoint of a GPT")
    vocabulary = vocabulary or _vocabulary(data, found.path, found.args, found.tensors[TOKENS].shape[0])
    model = model_of(found.args, found.path, vocabulary)
    tensors = zero_centred(found.tensors) if is_zero_centred(found.args) else found.tensors
    tensors = for_model(tensors, vocabulary, model.tied_embeddings, added_biases(found.args, model))
    family = "megatron_gated" if model.is_gated else "megatron"
    usual = Keys(found.args, f"{found.path}: args").get("seq_length", int, model.sequence_length)
    length = sequence_length or min(usual, model.sequence_length)
    return write_run(Source(found.path, family, model, tensors, ()), run_dir, data, length)


def _own_tokenizer(path: pathlib.Path, args) -> dict[str, str]:
    """The options of the tokenizer that newer versions save in the checkpoint."""
    found = tokenizer_options(path / "tokenizer")
    if not found:
        kind, file = args.get("tokenizer_type"), args.get("tokenizer_model") or args.get("vocab_file")
        raise ConfigError(
            f"{path} does not have its tokenizer ({kind}, {file}): pass --tokenizer NAME|FILE"
            + (", such as gpt2" if kind == "GPT2BPETokenizer" else "")
        )
    return found


def _vocabulary(data: DataConfig, path: pathlib.Path, args, rows: int) -> int:
    """The tokenizer's tokens, if the checkpoint's table is theirs with padding."""
    count = load_tokenizer(data.tokenizer, data.end_of_document).vocabulary
    if padded_rows(args, count) != rows:
        raise ConfigError(
            f"tokenizer {data.tokenizer} has {count} tokens, padded {padded_rows(args, count)}, and {path} has {rows} rows: "
            f"pass the --tokenizer of the checkpoint, or its --vocabulary of at most {rows}"
        )
    return count


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megajax.interop.megatron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="import", parser_class=Parser)
    add = commands.add_parser("import", help="a checkpoint of Megatron-LM to a run directory", allow_abbrev=False)
    add.renamed = {"--iteration": "--step"}
    add.add_argument("directory", metavar="SAVE", type=local_path, help="of --save, or of one iteration")
    add.add_argument("--step", metavar="NUMBER|release", type=plain_text, help="(default: the last one)")
    add.add_argument(
        "--vocabulary", metavar="COUNT", type=whole(), help="tokens without padding (default: the tokenizer's)"
    )
    add_import_options(add, "the checkpoint's seq_length")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Writes golden/FAMILY.gguf: the golden models of tests/interop as llama.cpp's converter writes them, in fp32.

python tests/interop/make_gguf_golden.py LLAMA_CPP      in an environment with megajax[judges,gguf]; LLAMA_CPP is a source
                                                        tree with conversion/ (the files are from llama-cpp-python 0.3.36's)

The converter knows no tokenizer of 64 words, so the files have none. llama.cpp has no window for Mistral.
"""

import pathlib
import sys

GOLDEN = pathlib.Path(__file__).parent / "golden"
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")


def main(source: str) -> None:
    """Writes all files."""
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from gguf import LlamaFileType

    for family in FAMILIES:
        directory, path = GOLDEN / family, GOLDEN / f"{family}.gguf"
        keys = ModelBase.load_hparams(directory, False)
        if family == "gpt2":
            keys["n_ctx"] = keys["n_positions"]  # transformers 5 does not write it
        kind = get_model_class(get_model_architecture(keys, ModelType.TEXT))
        kind.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("no_vocab")
        model = kind(directory, LlamaFileType.ALL_F32, path, hparams=keys, model_name=family)
        model.write()
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])

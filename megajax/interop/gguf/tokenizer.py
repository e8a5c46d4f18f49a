"""The tokenizer in a GGUF file's metadata as files of Hugging Face: tokenizer.json and tokenizer_config.json.

Sentencepiece's are rebuilt by transformers (`convert_gguf_tokenizer`; reading the file itself it would need torch).

A file has the vocabulary and the merges of a byte-level BPE, and the name of the expressions that split a text before the
merges, not the expressions: SPLITS has those of the families that megajax reads. They are not left to transformers 5.24,
which has no split of SmolLM's digits, merges Llama 3's whole words, and does not compose what Qwen2 composes: other ids than
the original tokenizers' (tests/interop/test_gguf_tokenizers.py).
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError
from megajax.data.hugging_face import library
from megajax.schedules.errors import shown

__all__ = ["missing_tokenizer", "write_tokenizer"]

BPE, SENTENCEPIECE = "gpt2", "llama"  # tokenizer.ggml.model of byte-level BPE, and of sentencepiece's BPE
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
# tokenizer.ggml.pre -> expression for `Split` before the bytes; None: GPT-2's own, which ByteLevel has.
LLAMA3 = ("llama-bpe", "llama-v3", "llama3")
SPLITS = {"gpt-2": None, "smollm": None, "qwen2": QWEN2_WORDS} | dict.fromkeys(LLAMA3, LLAMA3_WORDS)
SINGLE_DIGITS = ("smollm",)  # each digit is a word
WHOLE_WORDS = LLAMA3  # words in the vocabulary are not merged step by step
NFC = ("qwen2",)
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(metadata: Mapping[str, Any], path: pathlib.Path, directory: pathlib.Path) -> None:
    """Writes the two files, or none if the tokenizer is of another kind.

    Args:
      metadata: of the GGUF file.
      path: the file, for messages.
      directory: where to write.

    Raises:
      ConfigError: vocabulary or merges are damaged.
    """
    kind, words = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != SENTENCEPIECE and (kind != BPE or words not in SPLITS):
        return
    if kind == SENTENCEPIECE:
        library(f"the tokenizer of {path}")
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        if kind == SENTENCEPIECE:
            inner = _sentencepiece(metadata)
        else:
            kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
            inner = _byte_level(words, tokens, metadata["tokenizer.ggml.merges"], kinds)
        _add_ends(inner, metadata, tokens, begins=kind == SENTENCEPIECE or words in LLAMA3)
        inner.save(str(directory / "tokenizer.json"))
        special = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL.items()}
        settings = {name: tokens[number] for name, number in special.items() if number is not None}
    except Exception as error:  # the library raises Exception itself
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path} has a damaged tokenizer ({reason}): pass --tokenizer with the original") from None
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def missing_tokenizer(metadata: Mapping[str, Any], path: pathlib.Path) -> ConfigError:
    """The error for a file whose tokenizer `write_tokenizer` does not write."""
    kind, words = (shown(metadata.get(f"tokenizer.ggml.{name}")) for name in ("model", "pre"))
    return ConfigError(
        f"{path} has a tokenizer of kind {kind} with words of {words}, which cannot be rebuilt from it (sentencepiece's "
        f"can, and BPE with words of {', '.join(SPLITS)}): pass --tokenizer with the original one's directory"
    )


def _sentencepiece(metadata: Mapping[str, Any]):
    from tokenizers import decoders, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    parts = {name: metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type", "merges")}
    parts = {name: value for name, value in parts.items() if value is not None}
    inner, _ = convert_gguf_tokenizer(metadata["general.architecture"], parts | {"tokenizer_type": SENTENCEPIECE})
    if metadata.get("tokenizer.ggml.add_space_prefix") is False:  # which transformers does not read
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return inner


def _add_ends(inner: Any, metadata: Mapping[str, Any], tokens: list[str], begins: bool) -> None:
    """The post-processor that adds the first and the last token of a text; `begins`: what a file without flags means."""
    from tokenizers import processors

    ends = {}
    for name, usual in (("bos", begins), ("eos", False)):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{name}_token", usual) and number is not None:
            ends[name] = (tokens[number], int(number))
    if not ends:
        return
    pieces = [ends["bos"][0]] if "bos" in ends else []
    pieces += ["$A", *([ends["eos"][0]] if "eos" in ends else [])]
    pair = pieces + [piece.replace("$A", "$B") + ":1" for piece in pieces]
    inner.post_processor = processors.TemplateProcessing(pieces, pair, list(ends.values()))


def _byte_level(words: str, tokens: list[str], merges: list[str], kinds: list[int]):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=words in WHOLE_WORDS))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if words in SINGLE_DIGITS else []
    if SPLITS[words] is not None:
        steps.append(pre_tokenizers.Split(Regex(SPLITS[words]), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=SPLITS[words] is None))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    if words in NFC:
        inner.normalizer = normalizers.NFC()
    for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
        inner.add_tokens([AddedToken(token, normalized=False, special=is_special) for token in added])
    return inner

"""The special tokens of a tokenizer's files that lm-evaluation-harness's rules depend on.

The tokenizers of `megajax.data.tokenizers` add no special token to a text, as Megatron-LM's training does. lm-eval's model
of type `hf` scores texts with those that the tokenizer's own files add.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from megajax.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megajax.interop.hugging_face.config import read_json

__all__ = ["SpecialTokens", "read_special_tokens"]


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Ids.

    Attributes:
      start: what the tokenizer puts in front of each text.
      prefix: what precedes an empty context: the start of sentence, or else the end of a document.
      prefix_text: its text; "" if it has none.
      hidden: what decoded texts do not show.
    """

    start: tuple[int, ...]
    prefix: int
    prefix_text: str
    hidden: frozenset[int]


def read_special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """The special tokens of a tokenizer.

    Of a tokenizer.json: `start` is what its post-processor adds, the others are as tokenizer_config.json beside it and the
    file's own added tokens say. Of a sentencepiece model: its start of sentence, and all control tokens. Of a tokenizer by
    name: the end of a document alone.

    Raises:
      ConfigError: tokenizer_config.json cannot be read.
    """
    end = tokenizer.end_of_document
    path = pathlib.Path(tokenizer.name)
    if isinstance(tokenizer, SentencePieceTokenizer):
        inner = tokenizer.inner
        hidden = {token for token in range(tokenizer.vocabulary) if inner.is_control(token) or inner.is_unknown(token)}
        first = inner.bos_id()
        prefix = first if first >= 0 else end
        start = (first,) if first >= 0 else ()
        return SpecialTokens(start, prefix, inner.id_to_piece(prefix), frozenset({end, *hidden}))
    if path.suffix != ".json" or path.name == "vocab.json" or not isinstance(tokenizer, HuggingFaceTokenizer):
        return SpecialTokens((), end, "", frozenset({end}))
    start, named = _start(path), _named(path)
    ids = {name: tokenizer.inner.token_to_id(text) for name, text in named.items()}
    added = tokenizer.inner.get_added_tokens_decoder()
    hidden = {token for token, one in added.items() if one.special} | {
        token for token in ids.values() if token is not None
    }
    prefix = ids.get("bos_token")
    if prefix is None:
        prefix = start[0] if start else end
    return SpecialTokens(start, prefix, tokenizer.inner.id_to_token(prefix) or "", frozenset({end, *hidden}))


def _start(path: pathlib.Path) -> tuple[int, ...]:
    """The ids that the post-processor of a tokenizer.json puts in front of a text."""
    from tokenizers import Tokenizer as Original

    inner = Original.from_file(str(path))  # the one of a `HuggingFaceTokenizer` has no post-processor
    inner.no_padding()
    plain, special = (inner.encode("a", add_special_tokens=add).ids for add in (False, True))
    before = next((at for at in range(len(special)) if special[at : at + len(plain)] == plain), 0)
    return tuple(special[:before])


def _named(path: pathlib.Path) -> Mapping[str, str]:
    """The special tokens by name, "bos_token" and the like, in the tokenizer_config.json beside a tokenizer.json."""
    settings = path.with_name("tokenizer_config.json")
    found: dict[str, Any] = read_json(settings) if settings.is_file() else {}
    named = {name: value for name, value in found.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}

"""Long texts in pieces: the tokenizers library needs 130 bytes of memory for each byte of a text that it encodes.

A text is cut only where its tokens are those of the pieces one after the other: before a space between two letters, or after
a line's end between two characters that are not spaces. There the pre-tokenizers of `splits_at_cuts` begin a new word, and
normalization and merges do not look beyond a word.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["LONGEST_WHOLE", "batches", "pieces", "splits_at_cuts"]

PIECE = 1 << 18  # characters of a piece, extended to the next place for a cut
BATCH = 1 << 20  # characters that are encoded at once
LONGEST_WHOLE = 1 << 25  # characters of a text that cannot be cut: 4 GB of memory
CUT = re.compile(r"[^\W\d_](?= [^\W\d_])|\S\n(?=\S)")
# Pre-tokenizers that split a text at every cut, and those that leave it to another one of their sequence.
SPLITTING = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
NEUTRAL = ("Digits", "Punctuation", "ByteLevel")
# Normalizers that change a character without looking at others than the marks after it.
LOCAL = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt")
# The patterns of GPT-4 and Llama 3 (numbers of up to three digits) and of Qwen (single digits).
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
PATTERN = _WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = (PATTERN, PATTERN.replace("{1,3}", ""))


def splits_at_cuts(inner: Any) -> bool:
    """Whether a tokenizers.Tokenizer has the same tokens for a text and for its `pieces`, by the kinds of its parts."""
    if any(" " in token.content or token.lstrip or token.rstrip for token in inner.get_added_tokens_decoder().values()):
        return False
    if inner.normalizer is not None and not all(one.get("type") in LOCAL for one in _parts(inner.normalizer)):
        return False
    found = _parts(inner.pre_tokenizer) if inner.pre_tokenizer is not None else []
    if any(one.get("add_prefix_space") for one in found):  # to every piece that begins a line
        return False
    splitting = [_is_splitting(one) for one in found]
    return any(splitting) and all(
        splits or one.get("type") in NEUTRAL for one, splits in zip(found, splitting, strict=True)
    )


def _is_splitting(part: dict[str, Any]) -> bool:
    if part.get("type") == "ByteLevel":
        return bool(part.get("use_regex", True))  # GPT-2's pattern
    if part.get("type") == "Split":
        pattern = part.get("pattern", {}).get("Regex")
        return pattern in PATTERNS and part.get("behavior") == "Isolated" and not part.get("invert")
    return part.get("type") in SPLITTING


def _parts(component: Any) -> list[dict[str, Any]]:
    """The settings of a component of the library, or of those of its sequence."""
    found = json.loads(component.__getstate__())
    return [
        inner
        for one in found.get("pretokenizers", found.get("normalizers", [found]))
        for inner in one.get("pretokenizers", one.get("normalizers", [one]))
    ]


def pieces(text: str) -> Iterator[str]:
    """A text in pieces of about PIECE characters; a text without a place for a cut is one piece."""
    start = 0
    while len(text) - start > 2 * PIECE and (found := CUT.search(text, start + PIECE)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:] if start else text


def batches(texts: Sequence[str], may_cut: bool) -> Iterator[tuple[list[int], list[str]]]:
    """Texts, or their pieces, in batches of about BATCH characters: the index of each one's text, and the texts.

    Args:
      texts: in order.
      may_cut: whether long ones are cut.
    """
    numbers: list[int] = []
    batch: list[str] = []
    size = 0
    for number, text in enumerate(texts):
        for piece in pieces(text) if may_cut else (text,):
            if batch and size + len(piece) > BATCH:
                yield numbers, batch
                numbers, batch, size = [], [], 0
            numbers.append(number)
            batch.append(piece)
            size += len(piece)
    if batch:
        yield numbers, batch

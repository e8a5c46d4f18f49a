"""Preferences, a prompt with a chosen and a rejected completion, as rows of tokens: TRL's formats and tokens.

A line of a file is one of

    {"prompt": "...", "chosen": "...", "rejected": "..."}
    {"prompt": [message, ...], "chosen": [message, ...], "rejected": [message, ...], "tools": [...]}
    {"chosen": ..., "rejected": ...}                                 the prompt is what both begin with

A completion starts where the tokens of the whole text differ from those of the prompt, for both completions alike. A text's
completion ends with the token that ends a document. As with TRL's max_length, what is longer than the sequence is cut at
its end, and a pair whose prompt fills it is left out.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.data.chat_template import load_template
from megajax.data.loader import EpochOrder
from megajax.data.sft import records
from megajax.data.sft_rows import check_messages, check_text, object_of, tools_of
from megajax.data.text import read_blocks
from megajax.data.tokenizers import Tokenizer
from megajax.schedules.errors import counted

__all__ = ["PreferenceBatches", "PreferencePair", "completion_row", "load_preferences"]

SIDES = ("chosen", "rejected")
FORMAT = "give prompt, chosen and rejected"


@dataclasses.dataclass(frozen=True)
class PreferencePair:
    """Tokens of a prompt and of its two completions (chosen, rejected), int32."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, np.ndarray]


def load_preferences(
    files: Sequence[str], tokenizer: Tokenizer, template: str | None, longest: int
) -> tuple[list[PreferencePair], str]:
    """The pairs of some files, and their counts in words.

    Args:
      files: JSON lines, also .gz and .zst.
      tokenizer: the model's.
      template: file of a chat template; None: the tokenizer's.
      longest: tokens of prompt and completion together.

    Raises:
      ConfigError: a file cannot be read or has no pairs, a line is not as above, or there is no chat template.
    """
    pairs, lines, cut, dropped = [], 0, 0, 0
    for file in files:
        for block in read_blocks(file, "jsonl", "--pairs"):
            for place, row in records(block):
                lines += 1
                pair = _pair(place, row, tokenizer, template)
                if len(pair.prompt) >= longest:
                    dropped += 1
                    continue
                cut += any(len(pair.prompt) + len(one) > longest for one in pair.completions)
                pairs.append(pair)
    if not pairs:
        reason = (
            f"{counted(dropped, 'pair')}, all with prompts of {longest:,} tokens or more" if dropped else "no pairs"
        )
        raise ConfigError(f"{', '.join(files)} has {reason}: pass --pairs another file, or a larger --sequence-length")
    words = f"{counted(lines, 'line')}, {counted(len(pairs), 'pair')}"
    counts = {"cut": cut, "dropped for the length of their prompts": dropped}
    return pairs, words + "".join(f", {count:,} {what}" for what, count in counts.items() if count)


def _pair(place: str, row: Mapping[str, Any], tokenizer: Tokenizer, template: str | None) -> PreferencePair:
    for side in SIDES:
        if side not in row:
            raise ConfigError(f"{place} has no {side}: {FORMAT}")
    chat = isinstance(row["chosen"], list)
    for name in ("prompt", *SIDES):
        if name in row and isinstance(row[name], list) != chat:
            raise ConfigError(f"{place}: some of prompt, chosen and rejected are chats, others are not: {FORMAT}")
    prompt, chosen, rejected = _with_prompt(row)
    if chat:
        for completion in (chosen, rejected):
            check_messages(place, [*prompt, *completion])
            if not completion or completion[-1]["role"] != "assistant":
                raise ConfigError(
                    f"{place}: a completion does not end with a message of the assistant: correct the line"
                )
        tools, variables = tools_of(place, row), object_of(place, row, "chat_template_kwargs")
        chats = load_template(tokenizer, template)
        try:
            before = chats.prompt(prompt, tools, **variables)
            wholes = [chats.whole([*prompt, *completion], tools, **variables) for completion in (chosen, rejected)]
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
    else:
        for name, value in zip(SIDES, (chosen, rejected), strict=True):
            check_text(place, name, value)
        before = tokenizer.encode_prompt(prompt)
        wholes = [_ended(tokenizer.encode_prompt(prompt + completion), tokenizer) for completion in (chosen, rejected)]
    start = min(_common(before, whole) for whole in wholes)
    if not start:
        raise ConfigError(f"{place}: the prompt is empty: give a prompt of a token or more")
    return PreferencePair(before[:start], (wholes[0][start:], wholes[1][start:]))


def _with_prompt(row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected; without a prompt, it is what both begin with (TRL's extract_prompt)."""
    chosen, rejected = row["chosen"], row["rejected"]
    if "prompt" in row:
        return row["prompt"], chosen, rejected
    same = next((at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    same = min(len(chosen), len(rejected)) - 1 if same is None else same
    if same and chosen[same - 1] == " ":
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]


def _ended(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    end = tokenizer.end_of_document
    return tokens if len(tokens) and tokens[-1] == end else np.append(tokens, np.int32(end))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that both begin with."""
    count = min(len(a), len(b))
    differing = np.flatnonzero(a[:count] != b[:count])
    return int(differing[0]) if len(differing) else count


def completion_row(prompt: np.ndarray, completion: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Arrays "tokens", "labels" int32 [length] and "weights" fp32 [length], 1 for the completion; cut at its end."""
    ids = np.concatenate([prompt, completion])[:length]
    row = {name: np.zeros(length, np.int32) for name in ("tokens", "labels")} | {
        "weights": np.zeros(length, np.float32)
    }
    row["tokens"][: len(ids)] = ids
    row["labels"][: len(ids) - 1] = ids[1:]
    row["weights"][len(prompt) - 1 : len(ids) - 1] = 1
    return row


class PreferenceBatches:
    """The batches of `PreferenceModel`: samples 2 i and 2 i + 1 of the run are of the i-th pair of an `EpochOrder`.

    Attributes:
      tokenizer, description: of the run's directory and log.
      reference: fp32 [pairs, 2], the completions' log-probabilities by the reference model; None until they are known.
      mismatched: likewise, of the prompts with the completions of the pairs before them; only for KTO.
    """

    def __init__(
        self,
        pairs: Sequence[PreferencePair],
        shape: tuple[int, int],
        length: int,
        seed: int,
        *,
        with_mismatched: bool = False,
        tokenizer: Tokenizer | None = None,
        description: Sequence[str] = (),
    ):
        """`shape`: microbatches and samples of one; `length`: tokens of a sample."""
        self.pairs, self.shape, self.length, self.with_mismatched = pairs, shape, length, with_mismatched
        self.tokenizer, self.description = tokenizer, description
        self.order = EpochOrder(len(pairs), seed)
        self.reference: np.ndarray | None = None
        self.mismatched: np.ndarray | None = None

    def fingerprint(self) -> int:
        """A checksum of all tokens, uint32."""
        found = self.length
        for pair in self.pairs:
            for ids in (pair.prompt, *pair.completions):
                found = zlib.crc32(np.append(ids, np.int32(-1)).tobytes(), found)
        return found

    def row(self, pair: int, side: int, mismatched: bool = False) -> dict[str, np.ndarray]:
        """A completion's arrays; `mismatched`: of the pair before."""
        completion = self.pairs[pair - mismatched].completions[side]  # -1: the last pair
        return completion_row(self.pairs[pair].prompt, completion, self.length)

    def batch(self, consumed_samples: int) -> dict[str, np.ndarray]:
        """Arrays [microbatches, samples, ...] of the samples from `consumed_samples` on."""
        numbers = consumed_samples + np.arange(self.shape[0] * self.shape[1])
        places = [(self.order.row(int(number) // 2), int(number) % 2) for number in numbers]
        rows = _stacked([self.row(*place) for place in places])
        rows |= {"sample": numbers.astype(np.uint32), "reference": self._of(self.reference, places)}
        if self.with_mismatched:
            other = _stacked([self.row(*place, mismatched=True) for place in places])
            rows |= {f"kl_{name}": array for name, array in other.items()}
            rows |= {"kl_reference": self._of(self.mismatched, places), "kl": np.zeros(len(places), np.float32)}
        return {name: array.reshape(*self.shape, *array.shape[1:]) for name, array in rows.items()}

    def _of(self, scores: np.ndarray | None, places: Sequence[tuple[int, int]]) -> np.ndarray:
        return np.zeros(len(places), np.float32) if scores is None else np.array([scores[at] for at in places])


def _stacked(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

"""JSON lines for supervised fine-tuning: the tokens of each sample, and which of them have loss weight 1.

The rows are of the forms in `sft_rows`. Chats become tokens by the tokenizer's template (`chat_template`), and the tokens of
the assistant have loss weight 1. A prompt and its completion are joined as they are, after the tokens that the tokenizer
puts in front of a text (<s>), and followed by the end of a document. The whole text is encoded at once, and a token is part
of the answer if any of its characters is.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.data.blocks import Block, json_lines
from megajax.data.chat_template import ChatTemplate, Sample, has_template, load_template
from megajax.data.file_kinds import not_utf8
from megajax.data.sft_rows import Chat, Pair, read_row
from megajax.data.text import read_records
from megajax.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megajax.schedules.errors import counted

__all__ = ["Answers", "load_answers", "records"]


@dataclasses.dataclass(frozen=True)
class Answers:
    """The samples of some files.

    Attributes:
      name: the files.
      ids: tokens of all samples, int32 [tokens].
      loss_mask: whether each is part of an answer, bool [tokens].
      offsets: first token of each sample, and the number of tokens, int64 [samples + 1].
      lines: of the files.
      cut, dropped: samples that were longer than the sequence.
      unanswered: samples dropped because their cut left no answer.
    """

    name: str
    ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    lines: int
    cut: int
    dropped: int
    unanswered: int

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self.offsets) - 1

    def describe(self) -> str:
        """Counts in words."""
        answers = int(self.loss_mask.sum())
        text = f"{counted(self.lines, 'line')}, {counted(self.count, 'sample')}, "
        text += f"{answers:,} of {len(self.ids):,} tokens are answers"
        counts = {"cut": self.cut, "dropped as too long": self.dropped, "cut before an answer": self.unanswered}
        return text + "".join(f", {count:,} {what}" for what, count in counts.items() if count)


@functools.lru_cache(maxsize=2)
def load_answers(
    files: tuple[str, ...], tokenizer: Tokenizer, template: str | None, longest: int, drop_long: bool
) -> Answers:
    """Reads files.

    Args:
      files: JSON lines, also .gz and .zst; Parquet, Arrow, folders of save_to_disk; URLs and hub:ORG/NAME.
      tokenizer: the model's.
      template: file of a chat template; None: the one beside the tokenizer's file.
      longest: tokens of a sample.
      drop_long: drop longer ones; if not, they are cut.

    Raises:
      ConfigError: a file cannot be read or has no samples; a line is not as above, with its number; there is no template;
        or the tokenizer cannot be used for chats.
    """
    chats = functools.cache(lambda: load_template(tokenizer, template))
    has_chats = functools.cache(lambda: has_template(tokenizer, template))
    ids, masks, counts = [], [], dict.fromkeys(("lines", "cut", "dropped", "unanswered"), 0)
    for file in files:
        for block in read_records(file, "--sft-data"):
            rows = [(place, read_row(place, record, has_chats)) for place, record in records(block)]
            counts["lines"] += len(rows)
            for tokens, loss_mask in _samples(rows, tokenizer, chats):
                if len(tokens) > longest:
                    counts["dropped" if drop_long else "cut"] += 1
                    if drop_long:
                        continue
                    tokens, loss_mask = tokens[:longest], loss_mask[:longest]
                    if not loss_mask[1:].any():
                        counts["cut"] -= 1
                        counts["unanswered"] += 1
                        continue
                ids.append(tokens)
                masks.append(loss_mask)
    name = ", ".join(files)
    if not ids:
        long = counts["dropped"] + counts["unanswered"]
        problem = f"{counted(long, 'sample')}, all longer than {longest:,} tokens" if long else "no samples"
        raise ConfigError(f"{name} has {problem}: pass --sft-data another file, or a larger --sequence-length")
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in ids])])
    return Answers(name, np.concatenate(ids), np.concatenate(masks), offsets, **counts)


def _samples(
    rows: Sequence[tuple[str, Chat | Pair]], tokenizer: Tokenizer, chats: Callable[[], ChatTemplate]
) -> Iterator[Sample]:
    """The samples of some rows, in their order."""
    pairs = _pairs([row for _, row in rows if isinstance(row, Pair)], tokenizer)
    for place, row in rows:
        try:
            found = [next(pairs)] if isinstance(row, Pair) else _of_chat(row, chats())
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        yield from found


def _of_chat(chat: Chat, template: ChatTemplate) -> list[Sample]:
    found = template.samples(chat.messages, chat.tools, chat.trained, **chat.variables)
    if not all(loss_mask[1:].any() for _, loss_mask in found):
        raise ConfigError(f"{template.name} shows nothing that the assistant says: correct the line")
    return found


def _pairs(pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[Sample]:
    start, end = np.array(tokenizer.start, np.int32), np.array([tokenizer.end_of_document], np.int32)
    for ids, said in _tokens_and_answers(pairs, tokenizer):
        yield np.concatenate([start, ids, end]), np.concatenate([np.zeros(len(start), bool), said, [True]])


def _tokens_and_answers(pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[Sample]:
    """For each pair the tokens of its whole text, int32 [tokens], and whether each is part of the completion."""
    texts = ["".join(pair) for pair in pairs]
    if isinstance(tokenizer, HuggingFaceTokenizer):
        for (prompt, _), (ids, spans) in zip(pairs, tokenizer.encode_with_offsets(texts), strict=True):
            yield ids, spans[:, 1] > len(prompt)
        return
    # Other libraries give no character offsets. An answer starts where the tokens differ from those of the prompt alone.
    wholes = tokenizer.encode_all(texts)
    befores = tokenizer.encode_all([pair.prompt for pair in pairs])
    for whole, before in zip(wholes, befores, strict=True):
        common = min(len(whole), len(before))
        differing = np.flatnonzero(whole[:common] != before[:common])
        yield whole, np.arange(len(whole)) >= (differing[0] if len(differing) else common)


def records(block: Block) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the object of each line that is not blank."""
    for line in json_lines(block):
        place = f"{block.path}, line {line.number}"
        try:
            record = json.loads(line.content)
            json.dumps(record, ensure_ascii=False).encode()  # fails for half a surrogate pair
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}: the text is {not_utf8(error, block.path, line.before)}") from None
        except UnicodeEncodeError:
            raise ConfigError(f"{place}: the text is not UTF-8 (half a surrogate pair): correct the line") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place} is not JSON ({error}): correct the line") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{place} is a JSON {type(record).__name__}, not an object: give messages, or a prompt")
        yield place, record

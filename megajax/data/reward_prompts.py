"""Prompts for rollouts: JSON lines with "prompt", a text or the messages of a chat, and other keys for the reward."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.data.chat_template import load_template
from megajax.data.loader import EpochOrder
from megajax.data.sft import records
from megajax.data.sft_rows import check_text, read_question
from megajax.data.text import read_blocks
from megajax.data.tokenizers import Tokenizer

__all__ = ["PromptBatches", "RewardPrompt", "load_prompts"]


@dataclasses.dataclass(frozen=True)
class RewardPrompt:
    """A prompt.

    Attributes:
      prompt: the text or the messages.
      tokens: int32 [tokens].
      columns: the row's other keys.
    """

    prompt: Any
    tokens: np.ndarray
    columns: dict[str, Any]


def load_prompts(files: Sequence[str], tokenizer: Tokenizer, template: str | None, longest: int) -> list[RewardPrompt]:
    """The prompts of some files.

    Args:
      files: JSON lines, also .gz and .zst.
      tokenizer: the model's.
      template: file of a chat template; None: the tokenizer's.
      longest: tokens of a prompt.

    Raises:
      ConfigError: a file cannot be read or has no prompts; a line is not as above, or its prompt is too long.
    """
    found = []
    for file in files:
        for block in read_blocks(file, "jsonl", "--prompts"):
            for place, row in records(block):
                if "prompt" not in row:
                    raise ConfigError(f"{place} has no prompt: give a text or messages as prompt")
                prompt = row["prompt"]
                if isinstance(prompt, list):
                    chat = read_question(place, row, prompt)
                    tokens = load_template(tokenizer, template).prompt(chat.messages, chat.tools, **chat.variables)
                else:
                    check_text(place, "prompt", prompt)
                    tokens = tokenizer.encode_prompt(prompt)
                if len(tokens) > longest:
                    raise ConfigError(
                        f"{place}: the prompt has {len(tokens):,} tokens, and sequence_length less max_completion_length is "
                        f"{longest:,}: pass a larger --sequence-length, or remove the line"
                    )
                columns = {name: value for name, value in row.items() if name != "prompt"}
                found.append(RewardPrompt(prompt, tokens, columns))
    if not found:
        raise ConfigError(f"{', '.join(files)} has no prompts: pass --prompts another file")
    return found


class PromptBatches:
    """Batches of `PolicyModel` whose completions are still to be drawn: zeros, and the samples' numbers.

    Attributes:
      prompts: all of them.
      tokenizer, description: of the run's directory and log.
    """

    def __init__(
        self,
        prompts: Sequence[RewardPrompt],
        shape: tuple[int, int],
        arrays: dict[str, Any],
        seed: int,
        generations: int,
        tokenizer: Tokenizer,
        description: Sequence[str] = (),
    ):
        """`shape`: microbatches and samples of one; `arrays`: shapes of one sample; `generations`: of each prompt."""
        self.prompts, self.shape, self.arrays, self.generations = prompts, shape, arrays, generations
        self.tokenizer, self.description, self.order = tokenizer, description, EpochOrder(len(prompts), seed)

    def of(self, number: int) -> RewardPrompt:
        """The prompt of a sample of the run; `generations` neighbours have the same one."""
        return self.prompts[self.order.row(number // self.generations)]

    def batch(self, consumed_samples: int) -> dict[str, np.ndarray]:
        """Arrays [microbatches, samples, ...]."""
        batch = {name: np.zeros((*self.shape, *one.shape), one.dtype) for name, one in self.arrays.items()}
        numbers = consumed_samples + np.arange(self.shape[0] * self.shape[1], dtype=np.uint32)
        return batch | {"sample": numbers.reshape(self.shape).astype(np.uint32)}

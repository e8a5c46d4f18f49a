"""Where texts end: lengths, contexts, stops that span tokens and blocks, ends of documents; and prompts that are refused."""

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.data.tokenizers import ByteTokenizer
from megajax.generate.__main__ import shown_length
from megajax.generate.decoder import BLOCK, DecodeSizes
from megajax.generate.text import Ending, Sample, Speed, encode_prompt

BYTES = ByteTokenizer()


def extended(text: str, ending: Ending, block: int, prompt: int = 3, end: bool = False) -> Sample:
    """A sample that receives the bytes of a text in blocks."""
    sample = Sample(0, np.zeros(prompt, np.int32), ending, BYTES)
    tokens = [*text.encode(), *[256] * end, *b"surplus"]
    for first in range(0, len(tokens), block):
        sample.extend(tokens[first : first + block])
    return sample


@pytest.mark.parametrize("block", [1, 3, 50])
@pytest.mark.parametrize(
    ("ending", "text", "finish"),
    [
        (Ending(5, 100), "abcde", "length"),
        (Ending(50, 10), "abcdefg", "context"),  # 3 of the prompt and 7 new ones
        (Ending(7, 10), "abcdefg", "length"),
        (Ending(50, 100, ("ef",)), "abcd", "stop"),
        (Ending(50, 100, ("xyz", "gh", "fg")), "abcde", "stop"),  # the first in the text, not in the list
        (Ending(50, 100, ("abc",)), "", "stop"),
        (Ending(5, 100, ("ef",)), "abcde", "length"),
        (Ending(50, 100, (), frozenset({256})), "abcdefgh\u00e9", "end"),
        (Ending(50, 100, ("\u00e9",), frozenset({256})), "abcdefgh", "stop"),  # two tokens
    ],
)
def test_a_text_ends_where_it_should_whatever_the_blocks(ending, text, finish, block):
    sample = extended("abcdefgh\u00e9", ending, block, end=True)
    assert (sample.text, sample.finish) == (text, finish)
    assert BYTES.decode(sample.tokens).startswith(text)
    assert sample.extend([1, 2]) == 0 and sample.text == text


@pytest.mark.parametrize(("stop", "finish"), [("xab", "stop"), ("xyz", "length"), ("z", "length")])
def test_a_stop_may_begin_in_the_prompt_but_not_end_in_it(stop, finish):
    sample = Sample(0, np.array([*b"zxyzx"], np.int32), Ending(4, 100, (stop,)), BYTES)
    sample.extend([*b"abcd"])
    assert (sample.text, sample.finish) == ("" if finish == "stop" else "abcd", finish)


class Stripping:
    """A tokenizer that decodes its pieces without the first space, as SentencePiece's; the last of them is special."""

    pieces, end_of_document = (" ", " The", "o", "<|end|>"), 99

    @property
    def hugging_face(self):
        return self

    def decode(self, tokens) -> str:
        return "".join(self.pieces[token] for token in tokens).removeprefix(" ")

    def text(self, tokens) -> str:
        return self.decode([token for token in tokens if token != 3])


def test_an_ending_token_is_shown_as_it_is_after_others():
    """Alone it would be the space that is dropped."""
    sample = Sample(0, np.array([1]), Ending(4, 100, (), frozenset({0})), Stripping())
    sample.extend([0, 2])
    assert (sample.text, sample.finish) == (" ", "end")


@pytest.mark.parametrize(("tokens", "text"), [([0, 3], " "), ([3, 0], ""), ([0, 2], " ")])
def test_a_stop_in_a_special_token_leaves_nothing_of_it(tokens, text):
    sample = Sample(0, np.array([1]), Ending(4, 100, ("end|", "o")), Stripping())
    sample.extend(tokens)
    assert (sample.text, sample.finish) == (text, "stop")


def test_an_ended_document_without_a_token_for_it_goes_on():
    assert extended("ab", Ending(50, 100), 4, end=True).text == "absurplus"


@pytest.mark.parametrize("new", [1, 2, BLOCK, BLOCK + 1, BLOCK + 2, 5 * BLOCK, 1000])
@pytest.mark.parametrize(("prompt", "chunk"), [(1, 128), (100, 128), (128, 128), (129, 128), (1000, 128)])
def test_sizes(new, prompt, chunk):
    """Calls of equal size generate all tokens and few more; the prompt's chunks and the new tokens fit into the slots."""
    sizes = DecodeSizes(1, prompt, new, chunk)
    drawn = 1 + sizes.blocks * sizes.block
    assert new <= drawn < new + max(1, sizes.blocks) and sizes.block <= BLOCK
    assert prompt <= sizes.chunks * sizes.width < prompt + chunk
    assert sizes.slots >= prompt + drawn - 1


def test_what_following_tokens_may_change_is_not_shown():
    assert [shown_length(text, False) for text in ("", "a b", "a \N{REPLACEMENT CHARACTER}")] == [0, 3, 2]
    assert [shown_length(text, True) for text in ("", "do", "do not", "I do")] == [0, 0, 2, 1]  # " n't" becomes "n't"


def test_speed_is_one_line():
    speed = Speed(10, 2.0, 2000, 0.5)
    assert (
        speed.describe() == "prefill 10 tokens in 2.00 s (5 tokens/s), decode 2,000 tokens in 0.50 s (4,000 tokens/s)"
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "^line 3 of f: the prompt is empty: give at least one token to continue.$"),
        ("a" * 16, "^line 3 of f: the prompt has 16 tokens, but the model's context is 16 tokens, new .*at most 15.$"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(prompt, message):
    with pytest.raises(ConfigError, match=message):
        encode_prompt(prompt, BYTES, 16, "line 3 of f")
    assert len(encode_prompt("a" * 15, BYTES, 16, "")) == 15

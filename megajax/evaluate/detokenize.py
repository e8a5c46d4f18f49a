"""From the words of WikiText and the Penn Treebank back to text, by the rules of 1909.08053's evaluation.

Both corpora are split into words, with spaces around punctuation. The models of the papers were trained on plain text, so
the spaces are removed before the text is tokenized. The rules are those of Megatron-LM's zero-shot tasks, applied one after
the other to the whole file; other rules, or another order, give another perplexity.
"""

import re
from collections.abc import Callable, Mapping

__all__ = ["DETOKENIZERS", "penn_treebank", "wikitext"]


def _inside(opening: str, closing: str) -> tuple[re.Pattern, str]:
    """The rule that strips the spaces just inside a pair of delimiters, up to the first closing one."""
    first, last = re.escape(opening), re.escape(closing)
    return re.compile(rf"{first}\s*([^{last}]*?)\s*{last}"), rf"{opening}\1{closing}"


# (text or pattern, replacement)
WIKITEXT: tuple[tuple[str | re.Pattern, str], ...] = (
    ("s '", "s'"),
    # Megatron-LM's pattern for "' 90s": its slashes are literal, so it all but never applies, and it is kept as it is.
    (re.compile(r"/' [0-9]/"), "/'[0-9]/"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    *(_inside(opening, closing) for opening, closing in ("()", "[]", "{}", '""', "''")),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
PENN_TREEBANK: tuple[tuple[str, str], ...] = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def wikitext(text: str) -> str:
    """The raw text of WikiText-2 or -103 (wiki.test.tokens) as plain text."""
    return _apply(WIKITEXT, text)


def penn_treebank(text: str) -> str:
    """The raw text of the Penn Treebank (ptb.test.txt), with its numbers N, as plain text."""
    return _apply(PENN_TREEBANK, text)


DETOKENIZERS: Mapping[str, Callable[[str], str]] = {"wikitext103": wikitext, "ptb": penn_treebank}


def _apply(rules: tuple[tuple[str | re.Pattern, str], ...], text: str) -> str:
    for rule, replacement in rules:
        text = text.replace(rule, replacement) if isinstance(rule, str) else rule.sub(replacement, text)
    return text

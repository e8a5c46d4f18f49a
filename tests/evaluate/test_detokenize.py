"""Forty cases written by hand: the rules of Megatron-LM's detokenizers, one by one, and a sentence of each corpus."""

import pytest

from megajax.evaluate.detokenize import DETOKENIZERS, penn_treebank, wikitext

WIKITEXT = {
    "the boys ' team": "the boys' team",
    "read /' 9/ here": "read /'[0-9]/ here",  # the published pattern, literally
    "of the ' 90s": "of the ' 90s",  # which is why it does not apply here
    "guest @-@ starring": "guest-starring",
    "1 @,@ 200 men": "1,200 men",
    "3 @.@ 5 m": "3.5 m",
    "as follows : one": "as follows: one",
    "one ; two": "one; two",
    "The end . The start": "The end. The start",
    "Stop ! Now": "Stop! Now",
    "Why ? Because": "Why? Because",
    "film , stage": "film, stage",
    "film ,stage": "film ,stage",  # a space on both sides, or none is removed
    "( born 1930 )": "(born 1930)",
    "a ( b ) c ( d ) e": "a (b) c (d) e",
    "(  )": "()",
    "[ sic ]": "[sic]",
    "{ x }": "{x}",
    'the " Bill " series': 'the "Bill" series',
    'a " b " c " d "': 'a "b" c "d"',
    'an odd " quote': 'an odd " quote',
    "the ' Bill ' series": "the 'Bill' series",
    "= = = = Cast = = = =": "==== Cast ====",
    "= = = Cast = = =": "=== Cast ===",
    "= = Cast = =": "== Cast ==",
    "= Cast =": "= Cast =",
    "20 ° C": "20°C",
    "one \ntwo": "one\ntwo",
    "one\n two": "one\ntwo",
    "about N people": "about 1 people",
    "the film 's end": "the film's end",
    "one .\n": "one .\n",  # the full stop of a line's end is followed by a space in the raw file
    " = Robert Boulter = \n \n He left . \n": " = Robert Boulter =\n\nHe left.\n",
}
PENN_TREEBANK = {
    "the company 's shares": "the company's shares",
    "one \ntwo": "one\ntwo",
    "one\n two": "one\ntwo",
    "it does n't": "it doesn't",
    "rose N points": "rose1 points",  # as published: without the space before
    "paid $ 1 for it": "paid $1 for it",
    "the # 1 bank": "the #1 bank",
}


def test_there_are_forty():
    assert len(WIKITEXT) + len(PENN_TREEBANK) == 40


@pytest.mark.parametrize("words", WIKITEXT)
def test_wikitext(words):
    assert wikitext(words) == WIKITEXT[words] == DETOKENIZERS["wikitext103"](words)


@pytest.mark.parametrize("words", PENN_TREEBANK)
def test_penn_treebank(words):
    assert penn_treebank(words) == PENN_TREEBANK[words] == DETOKENIZERS["ptb"](words)

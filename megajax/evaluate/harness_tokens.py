"""Texts as tokens by the rules of lm-evaluation-harness's model of type `hf` (lm-eval 0.4.13), without its import.

It scores texts with the special tokens that the tokenizer's own files add, tokenizes a context and its continuation
together, and puts a token before contexts that have none.
"""

from collections.abc import Sequence

import numpy as np

from megajax.config import ConfigError
from megajax.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megajax.schedules.errors import shown

__all__ = ["HarnessTokens"]


class HarnessTokens:
    """A tokenizer as lm-eval uses it.

    Attributes:
      tokenizer: the model's.
      end: the token that ends texts.
      prefix: what precedes an empty context and the first token of a document: the start of sentence, or else the end.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Reads the special tokens of the tokenizer's files."""
        self.tokenizer, theirs = tokenizer, tokenizer.hugging_face
        self.end = tokenizer.end_of_document
        self.prefix = tokenizer.beginning
        if theirs is not None and theirs.eos_token_id is not None:
            self.end = theirs.eos_token_id
        if self.prefix is None:
            self.prefix = tokenizer.start[0] if theirs is None and tokenizer.start else self.end
        self._prefix_text = self._text_of(self.prefix)
        self.end_text = self._text_of(self.end) if theirs is not None else ""

    def _text_of(self, token: int) -> str:
        """The text of a special token; "" of one that has none."""
        if self.tokenizer.hugging_face is not None:
            return self.tokenizer.hugging_face.decode(token)
        if isinstance(self.tokenizer, SentencePieceTokenizer):
            return self.tokenizer.inner.id_to_piece(token)
        known = isinstance(self.tokenizer, HuggingFaceTokenizer) and self.tokenizer.files
        return (self.tokenizer.inner.id_to_token(token) or "") if known else ""

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Ids of a text with the tokens that the tokenizer adds (True), without (False), or without if it has the first."""
        theirs = self.tokenizer.hugging_face
        if add_special_tokens is None and (theirs or self._prefix_text) and text.startswith(self._prefix_text):
            add_special_tokens = False
        return self._encode(text, add_special_tokens)

    def encode_context(self, text: str) -> list[int]:
        """Ids of a text to continue."""
        theirs = self.tokenizer.hugging_face
        if theirs is None:
            return self.encode(text) or [self.prefix]
        begins = theirs.bos_token is not None and text.startswith(theirs.bos_token)
        return self._encode(text, False if begins else None) or [self.prefix]

    def _encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        if add_special_tokens is False and self.tokenizer.hugging_face is not None:
            found = self.tokenizer.hugging_face.encode(text, add_special_tokens=False)
            return self.tokenizer.checked(np.array(found, np.int32)).tolist()
        return (self.tokenizer.encode if add_special_tokens is False else self.tokenizer.encode_prompt)(text).tolist()

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context, at least one, and of its continuation.

        Spaces at the end of the context belong to the continuation. A context without tokens is `prefix`.

        Raises:
          ConfigError: the continuation has no token.
        """
        if context == "":
            before, after = [], self.encode(continuation, add_special_tokens=False)
        else:
            kept = context.rstrip()
            before = self.encode(kept)
            after = self.encode(kept + context[len(kept) :] + continuation)[len(before) :]
        if not before and after:
            before, after = ([self.prefix], after) if after[0] != self.prefix else (after[:1], after[1:])
        if not after:
            raise ConfigError(
                f"the continuation {shown(continuation)} of the task adds no token to its context {shown(context[-60:])}: "
                "it needs one or more; correct the task."
            )
        return before, after

    def text(self, tokens: Sequence[int], stops: Sequence[str]) -> str:
        """The text of new tokens, without special tokens, up to the first stop."""
        text = self.tokenizer.text(tokens)
        for stop in stops:
            text = text.split(stop)[0]
        return text

"""How preprocessing tokenizes documents: what each of its worker processes needs."""

import dataclasses
import os

from megajax.data import tokenizer_cache
from megajax.data.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = ["Recipe"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How documents are tokenized.

    Attributes:
      tokenizer: name of the tokenizer, which every worker loads.
      end_of_document: see `load_tokenizer`.
      keys: keys of the JSON objects; each is written to a separate dataset.
      append_end: append the end-of-document token to every document that is not empty.
      sentences: split documents into sentences, one sequence each.
      file: a tokenizer.json with the same ids, which workers load in place of a tokenizer of transformers: its import takes
        a second; None: they load `tokenizer`.
    """

    tokenizer: str
    end_of_document: str | None = None
    keys: tuple[str, ...] = ("text",)
    append_end: bool = True
    sentences: bool = False
    file: str | None = None

    def load(self) -> Tokenizer:
        """The tokenizer."""
        found = load_tokenizer(self.file or self.tokenizer, self.end_of_document)
        if self.file is not None:
            found.name = self.tokenizer  # for messages
        return found

    def for_workers(self, folder: str) -> tuple["Recipe", int]:
        """The recipe that workers load without transformers, if its tokenizer can be a file, and the number of its ids.

        Args:
          folder: where the file is written, if the user's cache does not have it.
        """
        key = tokenizer_cache.key_of(self.tokenizer, self.end_of_document)
        if kept := tokenizer_cache.find(key):
            return dataclasses.replace(self, file=kept.file, end_of_document=kept.end_of_document), kept.vocabulary
        found = self.load()
        if not isinstance(found, HuggingFaceTokenizer) or found.hugging_face is None:
            return self, found.vocabulary
        if found.inner.encode_special_tokens:  # which a file forgets
            return self, found.vocabulary
        file, end = os.path.join(folder, "tokenizer.json"), found.inner.id_to_token(found.end_of_document)
        found.inner.save(file, pretty=False)
        tokenizer_cache.keep(key, found.inner, found.vocabulary, end)
        return dataclasses.replace(self, file=file, end_of_document=end), found.vocabulary

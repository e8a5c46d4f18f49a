"""BERT's samples of a text in memory, which is repeated for as long as a run lasts."""

from collections.abc import Sequence

import numpy as np

from megajax.data.bert import BertSamples, Masking, WordPieces
from megajax.data.loader import EpochOrder
from megajax.data.text import split_sentences
from megajax.data.tokenizers import Tokenizer

__all__ = ["BertTextSamples"]


class Sentences:
    """The sentences of texts in memory, with the attributes of `IndexedDataset` that samples read.

    Attributes:
      prefix: the name of the text, for messages.
      lengths: int32 [sentences], tokens.
      documents: int64 [documents + 1], the first sentence of each document.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer):
        """Splits the texts into sentences, and these into tokens."""
        encoded = [tokenizer.encode_all(split_sentences(text)) for text in texts]
        documents = [[ids for ids in sentences if len(ids)] for sentences in encoded]
        self.prefix, self._ids = "the text", [ids for sentences in documents for ids in sentences]
        self.lengths = np.array([len(ids) for ids in self._ids], np.int32)
        self.documents = np.cumsum([0, *map(len, documents)])

    @property
    def document_count(self) -> int:
        return len(self.documents) - 1

    def sequence(self, index: int) -> np.ndarray:
        """The ids of a sentence."""
        return self._ids[index]


class BertTextSamples(BertSamples):
    """The samples of a text's documents: in another order and with other masks in each epoch."""

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        sequence_length: int,
        seed: int,
        masking: Masking = Masking(),  # noqa: B008 (it is frozen)
    ):
        """Splits the texts into sentences and chooses those of each sample; arguments and errors as of `BertSamples`."""
        pieces, sentences = WordPieces.from_tokenizer(tokenizer), Sentences(texts, tokenizer)
        bounds = (0, sentences.document_count)
        super().__init__(sentences, bounds, None, sequence_length, seed, pieces, masking)
        self._order = EpochOrder(self.count, seed)

    def index(self, description, build, documents, lengths, cache) -> np.ndarray:
        """Built; a text is not cached."""
        return build()["sentences"]

    def place(self, index: int) -> int:
        """The row of sample `index`."""
        return self._order.row(index)

    def sentence(self, number: int) -> list[int]:
        """The ids of a sentence, which are the tokenizer's."""
        return self.dataset.sequence(number).tolist()

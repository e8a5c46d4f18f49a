"""Documents to train on: the text in the package, or a file of the user's."""

import gzip
import importlib.resources
import json
import pathlib
import zlib

import numpy as np

from megajax.config import ConfigError
from megajax.data.corpus import kind_of
from megajax.data.tokenizers import Tokenizer


def load_documents(path: str | None = None) -> list[str]:
    """The documents of a file: the "text" of each line of a .jsonl, .json or .ndjson; of another file, the whole text.

    Args:
      path: a file, which may be a .gz; None is the bundled plays and poems (megajax/data/text/SOURCE.md).

    Raises:
      ConfigError: the file cannot be read, is empty, is not UTF-8, or a line of it is not a JSON object with a text.
    """
    if path is None:
        packaged = importlib.resources.files("megajax.data") / "text" / "corpus.jsonl.gz"
        return _documents("corpus.jsonl", gzip.decompress(packaged.read_bytes()).decode())
    try:
        raw = pathlib.Path(path).read_bytes()
        text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read the text {path}: {error.strerror or error}; give --text a readable file"
        ) from None
    except (EOFError, zlib.error):
        raise ConfigError(
            f"cannot read the text {path}: the compressed file is cut short or damaged; give --text a whole one"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the text {path} is not UTF-8 (byte {error.start}); convert it, or give another") from None
    documents = [document for document in _documents(path.removesuffix(".gz"), text) if document.strip()]
    if not documents:
        raise ConfigError(f"the text {path} is empty; give --text a file with text in it")
    return documents


def _documents(name: str, text: str) -> list[str]:
    if kind_of(name, "file") != "jsonl":
        return [text]
    documents = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut at U+2028 and others inside a string
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
            document.encode()  # no string has no encode; JSON can hold half a surrogate pair, UTF-8 cannot
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f'line {number} of {name} is not a JSON object with a string "text"') from None
        documents.append(document)
    return documents


def split_documents(documents: list[str], validation_share: float = 0.05) -> tuple[list[str], list[str]]:
    """(training, validation), by whole documents, so that validation text is new to the model.

    Documents from the end go to validation until it has at least `validation_share` (above 0) of the characters. If
    that would give it more than half of them, as when there is a single document, the last one taken is cut in two so
    that validation has just its share.
    """
    total = sum(map(len, documents))
    wanted, count, size = validation_share * total, 0, 0
    while size < wanted:
        count += 1
        size += len(documents[-count])
    training, validation = documents[:-count], documents[-count:]
    if size > total / 2:
        cut = int(size - wanted)
        training, validation = [*training, validation[0][:cut]], [validation[0][cut:], *validation[1:]]
    return training, validation


def tokenise(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """All documents as one int32 [tokens], an end of document after each."""
    end = np.array([tokenizer.end_of_document], np.int32)
    return np.concatenate([part for document in documents for part in (tokenizer.encode(document), end)])

"""Training text: loads documents from the bundled corpus or a file, and splits and tokenizes them."""

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
    """The documents of a file: the "text" of each line of a .jsonl, .json or .ndjson file; otherwise the whole file.

    Args:
      path: a file, which may be a .gz; None: the bundled plays and poems (megajax/data/text/SOURCE.md).

    Raises:
      ConfigError: the file cannot be read, is empty or not UTF-8, or a line is not a JSON object with a "text".
    """
    if path is None:
        packaged = importlib.resources.files("megajax.data") / "text" / "corpus.jsonl.gz"
        return _documents("corpus.jsonl", gzip.decompress(packaged.read_bytes()).decode())
    try:
        raw = pathlib.Path(path).read_bytes()
        text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read the text {path}: {error.strerror or error}; pass --text a readable file"
        ) from None
    except (EOFError, zlib.error):
        raise ConfigError(
            f"cannot read the text {path}: the compressed file is truncated or damaged; pass --text a complete file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the text {path} is not UTF-8 (byte {error.start}); convert it, or pass another") from None
    documents = [document for document in _documents(path.removesuffix(".gz"), text) if document.strip()]
    if not documents:
        raise ConfigError(f"the text {path} is empty; pass --text a file with text")
    return documents


def _documents(name: str, text: str) -> list[str]:
    if kind_of(name, "file") != "jsonl":
        return [text]
    documents = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also split at U+2028
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
            document.encode()  # fails for values that are not strings, and for half a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f'line {number} of {name} is not a JSON object with a string "text"') from None
        documents.append(document)
    return documents


def split_documents(documents: list[str], validation_share: float = 0.05) -> tuple[list[str], list[str]]:
    """Splits whole documents into (training, validation).

    Validation takes documents from the end until it has at least `validation_share` (above 0) of the characters. If it
    would then have more than half of them, as with a single document, the last document taken is split so that
    validation has exactly its share.
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
    """Concatenated ids of all documents, int32 [tokens], with an end of document after each."""
    end = np.array([tokenizer.end_of_document], np.int32)
    return np.concatenate([part for document in documents for part in (tokenizer.encode(document), end)])

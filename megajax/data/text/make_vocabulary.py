"""Builds vocab.txt, 2,048 lower-case WordPieces of the bundled text (--tokenizer wordpiece). Not run in training.

python make_vocabulary.py vocab.txt

The library's trainer breaks ties between equally frequent pairs differently from run to run.
"""

import sys

from tokenizers import BertWordPieceTokenizer

from megajax.data.text import load_documents

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

if __name__ == "__main__":
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    settings = {"vocab_size": 2048, "limit_alphabet": 100, "special_tokens": SPECIAL}
    tokenizer.train_from_iterator(load_documents(), show_progress=False, **settings)
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        out.write("".join(f"{piece}\n" for piece, _ in pieces))

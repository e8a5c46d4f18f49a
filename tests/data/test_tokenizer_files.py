"""The files of a tokenizer, of which a run directory keeps a copy."""

from megajax.data.tokenizers import load_tokenizer


def test_a_tokenizer_names_the_files_that_a_copy_of_it_needs(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    found = load_tokenizer(str(tmp_path / "vocab.txt"))
    assert {path.name for path in found.files} == {"vocab.txt", "tokenizer_config.json"}
    assert all(path.is_absolute() for path in found.files)
    assert not load_tokenizer("byte").files and not load_tokenizer("gpt2").files

"""TOML that somebody else wrote is read or refused, in one line and at once."""

import time

import pytest

from megajax.checkpoint.run_files import refuse_foreign
from megajax.config import ConfigError
from megajax.config.toml import load_config
from megajax.config.toml_file import MOST_PARTS, is_toml_with, read_toml
from megajax.data.tokenizer_files import find_file
from megajax.plan.cluster import load_cluster

HOSTILE = {
    "a long key": "a" + ".a" * 200_000 + " = 1",
    "a long table": "[a" + ".a" * 200_000 + "]",
    "a long array of tables": "[[a" + " . 'a'" * 200_000 + "]]",
    "a long quoted key": '"a"' + '."a"' * 200_000 + " = 1",
    "nested arrays": "a = " + "[" * 200_000,
    "nested tables": "a = " + "{a=" * 50_000,
    "one long word": "a" * 200_000,
    "a large file": "a = '" + "x" * 17_000_000 + "'",
    "no UTF-8": b"a = '\xff'",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_once(tmp_path, name):
    path, text = tmp_path / "config.toml", HOSTILE[name]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    start = time.process_time()
    for read in (load_config, lambda path, known: load_cluster(path)):
        with pytest.raises(ConfigError) as error:
            read(str(path), {})
        assert "\n" not in str(error.value)
    assert not is_toml_with(path, ("train",))
    with pytest.raises(ConfigError, match="its config.toml has no tokenizer"):
        find_file(str(tmp_path))
    (tmp_path / "other.bin").touch()
    with pytest.raises(ConfigError, match="holds no run of megajax"):
        refuse_foreign(tmp_path)
    assert time.process_time() - start < 20  # it was minutes


def test_legal_files_are_read(tmp_path):
    path = tmp_path / "a.toml"
    numbers = ", ".join(["0.125"] * 5000)
    path.write_text(f'[a.b."c.d"]\nx = [{numbers}]\ny = "{"." * 1000}"\nz = 1979-05-27T07:32:00.999Z\n')
    assert len(read_toml(path)["a"]["b"]["c.d"]["x"]) == 5000
    path.write_text("a" + ".a" * (MOST_PARTS - 1) + " = 1")
    assert is_toml_with(path, ("a",))

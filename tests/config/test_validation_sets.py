"""The words of --valid-data-path and --valid-sft-data."""

import pytest

from megajax.config import ConfigError, DataConfig
from megajax.config.validation_sets import validation_sets


@pytest.mark.parametrize(
    ("words", "sets"),
    [
        ("a", {"validation": ("a",)}),
        ("0.3 a 0.7 /lang=en/b ./x=y", {"validation": ("0.3", "a", "0.7", "/lang=en/b", "./x=y")}),
        ("books=a", {"books": ("a",)}),
        ("books=a b web.2-x=0.3 c 0.7 d=/e", {"books": ("a", "b"), "web.2-x": ("0.3", "c", "0.7"), "d": ("/e",)}),
        ("books= a web=../x=y ./x=y", {"books": ("a",), "web": ("../x=y", "./x=y")}),
    ],
)
def test_sets(words, sets):
    assert validation_sets(words.split(), "--valid-data-path") == sets


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a books=b", "--valid-data-path a is in no set, and others are: pass --valid-data-path NAME=a"),
        ("x=a x=b", "two sets called x: give each a name"),
        ("x= y=b", "x= has nothing after it: pass --valid-data-path x=PATH"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(train_data_path=("t",), valid_data_path=tuple(words.split())).validate()
    with pytest.raises(ConfigError, match=message.replace("data-path", "sft-data")):
        DataConfig(sft_data=("t",), valid_sft_data=tuple(words.split())).validate()

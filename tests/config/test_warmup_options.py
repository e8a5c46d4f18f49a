"""The warm-up has two options: the one that is passed counts, also where a recipe or a file has the other one."""

import pytest

from experiments.gpt3 import EXPERIMENT
from megajax.config import ConfigError
from megajax.config.cli import parse
from megajax.train.lr_schedule import learning_rate


def train_config(*words):
    return parse([*words, "--data", "1", "--pipe", "1", "--tensor", "1"], EXPERIMENT).run(1, "fp32").train


def test_warm_up_steps_replace_a_recipes_samples():
    recipe = train_config("--model", "gpt3-125m")
    assert recipe.warmup_samples == 183_105  # 375 million tokens in samples of 2048
    own = train_config("--model", "gpt3-125m", "--warmup-steps", "77")
    assert (own.warmup_steps, own.warmup_samples) == (77, None)
    assert learning_rate(own, 77 * 128) == pytest.approx(own.learning_rate / 2)
    assert learning_rate(own, 77 * 256) == pytest.approx(own.learning_rate)
    own = train_config("--model", "gpt3-125m", "--warmup-samples", "512")
    assert own.warmup_samples == 512


def test_warm_up_steps_replace_a_files_samples(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[train]\nwarmup_samples = 640\n")
    assert train_config("--config", str(file)).warmup_samples == 640
    assert train_config("--config", str(file), "--warmup-steps", "7").warmup_samples is None
    file.write_text("[options]\nmodel = 'gpt3-125m'\n[train]\nwarmup_steps = 77\n")
    assert train_config("--config", str(file)).warmup_samples is None
    file.write_text("[options]\nmodel = 'gpt3-125m'\n[train]\nwarmup_steps = 20\nwarmup_samples = 640\n")
    assert train_config("--config", str(file)).warmup_samples == 640


def test_both_are_refused():
    with pytest.raises(ConfigError, match="both give the warm-up: omit --warmup-steps or --warmup-samples"):
        train_config("--warmup-steps", "5", "--warmup-samples", "80")

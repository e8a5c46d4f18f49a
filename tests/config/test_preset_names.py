"""`--model` with a name of the Hub, a path, or a preset's name in another spelling: the message says what to pass."""

import pytest

from megajax.config import PRESETS, ConfigError, preset
from megajax.config.preset_names import OTHERS, preset_like

MEANT = {
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3.1-70B-Instruct": "llama3.1-70b",
    "meta-llama/Llama-2-7b-chat-hf": "llama2-7b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3.2-1b",
    "llama-3-8b": "llama3-8b",
    "Llama3-8B": "llama3-8b",
    "llama_3.1_405b": "llama3.1-405b",
    "gpt2-small": "gpt2",
    "openai-community/gpt2-xl": "gpt2-xl",
    "gpt-2": "gpt2",
    "gpt2_medium": "gpt2-medium",
    "gpt2-1.5b": "gpt2-xl",
    "gpt3": "gpt3-175b",
    "GPT3-175B": "gpt3-175b",
    "gpt-3-13b": "gpt3-13b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-8B-Base": "qwen3-8b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "allenai/OLMoE-1B-7B-0924": "olmoe-1b-7b",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "TINY": "tiny",
}


@pytest.mark.parametrize(("name", "meant"), MEANT.items())
def test_other_spellings_name_the_preset(name, meant):
    with pytest.raises(ConfigError, match=f"--model {meant}[;.]") as error:
        preset(name)
    assert ("--init-from DIR" in str(error.value)) == ("/" in name)


@pytest.mark.parametrize("name", ["nobody/heard-of-it", "./model", "/models/llama", "model.safetensors"])
def test_names_of_the_hub_and_paths_name_init_from(name):
    with pytest.raises(ConfigError, match="is not a preset but a .*--init-from DIR"):
        preset(name)


def test_a_gguf_file_names_the_import():
    with pytest.raises(ConfigError, match="megajax import FILE.gguf --run-dir RUN"):
        preset("SmolLM2-135M.Q8_0.gguf")


def test_a_folder_here_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "mymodel").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="but a path"):
        preset("mymodel")


@pytest.mark.parametrize(("name", "message"), [("gpt3-17b", "did you mean gpt3-175b"), ("zzz", "choose from tiny")])
def test_misspelled_names(name, message):
    with pytest.raises(ConfigError, match=message):
        preset(name)


def test_every_preset_means_itself():
    assert set(OTHERS.values()) <= set(PRESETS)
    letters = {name.replace("-", "") for name in PRESETS}
    assert len(letters) == len(PRESETS)
    assert all(preset_like(name.upper().replace("-", "_"), PRESETS) == name for name in PRESETS)

"""The message about a `--model` that is no preset: a name of the Hub, a path, or a preset's name in another spelling."""

import os
import re
from collections.abc import Iterable

from megajax.config.errors import near
from megajax.schedules.errors import shown

# What names of released weights have after the size.
SUFFIXES = re.compile(
    r"[-_.]?(instruct|chat|hf|base|uncased|cased|it|pt|v\d+(\.\d+)*|\d{4}|fp8|awq|gptq|gguf|bf16|preview|sft|dpo)$"
)
FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")
WEIGHTS = "megajax train --init-from DIR starts from weights, of a downloaded directory of Hugging Face"
# Names that differ from the preset's in more than their spelling.
OTHERS = {
    "gpt2small": "gpt2",
    "gpt2124m": "gpt2",
    "gpt2117m": "gpt2",
    "gpt2355m": "gpt2-medium",
    "gpt2345m": "gpt2-medium",
    "gpt2774m": "gpt2-large",
    "gpt21.5b": "gpt2-xl",
    "gpt21558m": "gpt2-xl",
    "gpt3": "gpt3-175b",
    "gpt3small": "gpt3-125m",
    "gpt3medium": "gpt3-350m",
    "gpt3large": "gpt3-760m",
    "gpt3xl": "gpt3-1.3b",
    "gpt31000b": "gpt3-1t",
    "bertlarge": "bert-336m",
    "mixtral": "mixtral-8x7b",
    "mistral": "mistral-7b",
}


def unknown_preset(name: str, presets: Iterable[str]) -> str:
    """The message about a name that is not among `presets`."""
    problem = f"model = {shown(name)} is not a preset"
    if name.lower().endswith(".gguf"):
        return f"{problem} but a file: megajax import FILE.gguf --run-dir RUN reads its weights."
    if name.startswith((".", "/", "~")) or name.lower().endswith(FILES) or os.path.isdir(name):
        return f"{problem} but a path: {WEIGHTS}."
    found = preset_like(name, presets)
    if found:
        released = f"; {WEIGHTS}" if "/" in name else ""
        return f"{problem}: its sizes are those of --model {found}{released}."
    if "/" in name:
        return f"{problem} but a name of the Hub: {WEIGHTS}; the presets are {', '.join(presets)}."
    return f"{problem}: {near(name.lower(), presets)} Pass --model NAME."


def preset_like(name: str, presets: Iterable[str]) -> str | None:
    """The preset that a name means: "meta-llama/Meta-Llama-3.1-8B-Instruct" is llama3.1-8b; None if there is none."""
    word = name.rpartition("/")[2].lower()
    word = re.sub(r"^(meta|openai|mistralai|qwen/|huggingfacetb|google)[-_]", "", word)
    known = {_letters(preset): preset for preset in presets}
    while True:
        letters = _letters(word)
        if found := known.get(letters) or OTHERS.get(letters):
            return found
        shorter = SUFFIXES.sub("", word)
        if shorter == word:
            return None
        word = shorter


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name)

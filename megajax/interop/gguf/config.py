"""The metadata of a GGUF file as the config.json that transformers would have for the model.

transformers' own mapping needs torch; its AutoConfig reads what is written here, as it reads a directory's. Keys that
megajax does not know are refused, as they might change what the model computes. Numbers are stored in fp32: the shortest
decimal that rounds to the same fp32 is taken, 1e-05 and not 9.999999747378752e-06.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.interop.gguf.file import GGUFFile
from megajax.interop.hugging_face.families import FAMILIES
from megajax.interop.hugging_face.keys import Keys

__all__ = ["config_keys"]

# Keys after "<architecture>.": of sizes, those that follow from others, and those that change nothing here.
SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
DERIVED = ("vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length")
ROTARY = ("rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor")
ORIGINAL_LENGTH = "rope.scaling.original_context_length"
NORMS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
IGNORED = ("rope.scaling.finetuned",)
YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
KNOWN = {*SIZES, *DERIVED, *ROTARY, ORIGINAL_LENGTH, *YARN.values(), *NORMS, *IGNORED}
# Llama 3.1 and 3.2 (2407.21783). The file has what follows from these, the factor and the original length.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTHS = [2**power for power in range(13, 21)] + [2**power for power in range(4, 13)]


ENDS = ("eos", "eot", "eom")  # of a text, of a turn and of a message: each ends what is generated


def config_keys(file: GGUFFile) -> dict[str, Any]:
    """The keys of config.json.

    Raises:
      ConfigError: a size is missing, or a setting is not supported by megajax's block.
    """
    prefix = f"{file.architecture}."
    keys = Keys({name: _decimal(value) for name, value in file.metadata.items()}, file.path)
    for name in file.metadata:
        if name.startswith(prefix) and name.removeprefix(prefix) not in KNOWN:
            keys.require(name)
    config = _gpt2(file, keys, prefix) if file.architecture == "gpt2" else _llama(file, keys, prefix)
    shared = {
        "architectures": [FAMILIES[file.architecture].architecture],
        "model_type": file.architecture,
        "vocab_size": _rows(file, "token_embd.weight"),
        "tie_word_embeddings": "lm_head.weight" not in file.tensors,
        "torch_dtype": "float32",
    }
    names = {"bos_token_id": ("bos",), "pad_token_id": ("padding",), "eos_token_id": ENDS}
    for name, kinds in names.items():
        tokens = (keys.get(f"tokenizer.ggml.{kind}_token_id", int, None) for kind in kinds)
        found = list(dict.fromkeys(token for token in tokens if token is not None))
        shared |= {name: found if len(found) > 1 else found[0]} if found else {}
    return shared | config


def _gpt2(file: GGUFFile, keys: Keys, prefix: str) -> dict[str, Any]:
    return {
        "n_layer": keys.get(prefix + "block_count", int),
        "n_embd": keys.get(prefix + "embedding_length", int),
        "n_head": keys.get(prefix + "attention.head_count", int),
        "n_inner": _rows(file, "blk.0.ffn_up.bias"),  # llama.cpp writes 4 hidden as its length, whatever it is
        "n_positions": keys.get(prefix + "context_length", int),
        "layer_norm_epsilon": keys.get(prefix + "attention.layer_norm_epsilon", float),
    }


def _llama(file: GGUFFile, keys: Keys, prefix: str) -> dict[str, Any]:
    hidden, heads = keys.get(prefix + "embedding_length", int), keys.get(prefix + "attention.head_count", int)
    head = keys.get(prefix + "attention.key_length", int, hidden // max(1, heads))
    keys.require(prefix + "attention.value_length", head)
    keys.require(prefix + "rope.dimension_count", head)
    config = {
        "num_hidden_layers": keys.get(prefix + "block_count", int),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get(prefix + "attention.head_count_kv", int, heads),
        "head_dim": head,
        "intermediate_size": keys.get(prefix + "feed_forward_length", int),
        "max_position_embeddings": keys.get(prefix + "context_length", int),
        "rms_norm_eps": keys.get(prefix + "attention.layer_norm_rms_epsilon", float),
        "rope_theta": keys.get(prefix + "rope.freq_base", float, 10000.0),
        "rope_scaling": _scaling(keys, prefix),
    }
    if file.rotary_factors is not None:
        config["rope_scaling"] = _llama3_scaling(file, head, config["rope_theta"], config["rope_scaling"])
    if file.architecture == "llama":
        biases = {"attention_bias": "self_attn.q_proj", "mlp_bias": "mlp.up_proj"}
        config |= {key: f"model.layers.0.{name}.bias" in file.tensors for key, name in biases.items()}
    return config


def _scaling(keys: Keys, prefix: str) -> dict[str, Any] | None:
    kind = keys.get(prefix + "rope.scaling.type", str, "none")
    keys.require(prefix + "rope.scaling.type", "none", "linear", "yarn")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.get(prefix + "rope.scaling.factor", float)}
    if kind == "yarn":
        length = keys.get(prefix + ORIGINAL_LENGTH, int, keys.get(prefix + "context_length", int))
        scaling["original_max_position_embeddings"] = length
        others = {ours: keys.get(prefix + theirs, float, None) for ours, theirs in YARN.items()}
        scaling |= {name: value for name, value in others.items() if value is not None}
    return scaling


def _llama3_scaling(file: GGUFFile, head: int, base: float, other: Mapping[str, Any] | None) -> dict[str, Any]:
    """Llama 3's scaling whose divisors of the frequencies the file has; the largest of them is the factor."""
    stored = file.rotary_factors
    if other is None and len(stored) == head // 2 and np.all(stored > 0):
        factor, (low, high) = float(stored.max()), LLAMA3.values()
        for length in LLAMA3_LENGTHS:
            turns = length * base ** (-np.arange(0, head, 2) / head) / (2 * np.pi)  # in the original context
            share = np.clip((turns - low) / (high - low), 0, 1)
            if np.allclose(1 / ((1 - share) / factor + share), stored, rtol=1e-4):
                return {"rope_type": "llama3", "factor": factor, **LLAMA3, "original_max_position_embeddings": length}
    raise ConfigError(
        f"{file.path}: its rotary factors (rope_freqs.weight) are not those of Llama 3, the only ones that are supported: "
        "give another model"
    )


def _rows(file: GGUFFile, name: str) -> int:
    found = next((one for one in file.tensors.values() if one.name == name), None)
    if found is None:
        raise ConfigError(f"{file.path} has no tensor {name}: it is not a language model; give another file")
    return found.shape[0]


def _decimal(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value

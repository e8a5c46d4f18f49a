"""Directories that differ from the golden ones in config.json or in their tensors: what the ecosystem's tools have written.

`CONFIGS`, `TENSORS` and `QUANTIZED` are read as transformers reads them (test_variants.py has the fields, and with torch the
logits); `REFUSED` are errors.
"""

import json
import math
import pathlib
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from megajax.interop.safetensors import FLOATS, OTHERS, SINGLE, open_tensors
from tests.interop.hugging_face import copy_of

__all__ = [
    "CONFIGS",
    "QUANTIZED",
    "REFUSED",
    "REMOVED",
    "TENSORS",
    "arrays_of",
    "change_keys",
    "variant",
    "write_arrays",
]

REMOVED = object()
CODES = {dtype: code for code, dtype in (FLOATS | OTHERS).items()}
F8, E8 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def change_keys(directory: pathlib.Path, keys: Mapping) -> None:
    """Sets keys of config.json, also to null; REMOVED removes one."""
    path = directory / "config.json"
    values = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not REMOVED}))


def arrays_of(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors."""
    return {name: one.rows(0, one.shape[0]) for name, one in open_tensors(directory).items()}


def write_arrays(directory: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """model.safetensors, with each array in its own dtype."""
    entries, end = {}, 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    (directory / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + data)


def variant(case: tuple, to: pathlib.Path) -> pathlib.Path:
    """A golden directory with the changes of (family, keys of config.json, change of the arrays or None)."""
    family, keys, change = case[:3]
    directory = copy_of(family, to)
    change_keys(directory, keys)
    if change:
        arrays = arrays_of(directory)
        change(arrays)
        write_arrays(directory, arrays)
    return directory


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OLD = {"rope_parameters": REMOVED}  # a file of transformers 4
LONG = {"type": "longrope", "original_max_position_embeddings": 32, "short_factor": [1.0, 1.5, 2.0, 3.0]}
LONG |= {"long_factor": [2, 4.5, 6, 8.5]}
LAYERS = 4
# name -> (family, keys, no change of tensors, fields of the model)
CONFIGS = {
    "scaling beside parameters": (
        "qwen2",
        {"rope_scaling": YARN},
        None,
        {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_length": 32, "rotary_base": 10000.0},
    ),
    "scaling beside parameters, which loses their base": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        None,
        {"rotary_scaling": "linear", "rotary_factor": 2.0, "rotary_base": 10000.0},
    ),
    "a base beside a scaling": (
        "llama",
        OLD | {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 500},
        None,
        {"rotary_scaling": "linear", "rotary_factor": 2.0, "rotary_base": 500.0},
    ),
    "a base in the scaling": (
        "mistral",
        OLD | {"rope_scaling": YARN | {"rope_theta": 70.0}, "rope_theta": 500},
        None,
        {"rotary_scaling": "yarn", "rotary_base": 70.0},
    ),
    "longrope": (
        "llama",
        {"rope_scaling": LONG},
        None,
        {"rotary_scaling": "longrope", "rotary_factor": 4.0, "rotary_original_length": 32}
        | {"rotary_factors": ("1.0", "1.5", "2.0", "3.0", "2.0", "4.5", "6.0", "8.5")},
    ),
    "longrope of longer texts, with a factor": (
        "mistral",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.5], "long_factor": [3.0, 4.5], "factor": 5.0}
            | {"original_max_position_embeddings": 8, "attention_factor": 1.3}
        },
        None,
        {"rotary_factor": 5.0, "rotary_original_length": 8, "rotary_attention_factor": 1.3},
    ),
    "longrope with a factor of 0": (
        "llama",
        {"rope_scaling": LONG | {"factor": 0.0}},
        None,
        {"rotary_factor": 1.0, "rotary_attention_factor": None},
    ),
    "Phi-4-mini": (
        "described/phi3",
        OLD
        | {"original_max_position_embeddings": 8, "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [1.5, 20.25]}},
        None,
        {"rotary_scaling": "longrope", "rotary_original_length": 8, "rotary_fraction": 1.0}
        | {"rotary_factors": ("1.0", "1.1", "1.5", "20.25")},
    ),
    "no base": ("mixtral", OLD, None, {"rotary_base": 1e6, "rotary_scaling": "none"}),
    "yarn's keys without an effect": (
        "qwen3",
        {"rope_scaling": YARN | {"attn_factor": 3.0, "finetuned": True, "mscale": 0.7, "low_freq_factor": 2}},
        None,
        {"rotary_scaling": "yarn", "rotary_attention_factor": None, "rotary_low_frequency": 1.0},
    ),
    "yarn's two scales": (
        "qwen2",
        {"rope_scaling": YARN | {"mscale": 0.9, "mscale_all_dim": 0.4}},
        None,
        {"rotary_attention_factor": (0.09 * math.log(4) + 1) / (0.04 * math.log(4) + 1)},
    ),
    "yarn's equal scales": (
        "qwen2",
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        None,
        {"rotary_attention_factor": 1.0},
    ),
    "yarn's factor of attention": (
        "qwen2",
        {"rope_scaling": YARN | {"attention_factor": 1.3, "mscale": 0.9, "mscale_all_dim": 0.4}},
        None,
        {"rotary_attention_factor": 1.3},
    ),
    "yarn's factor from the lengths, and its other defaults": (
        "qwen2",
        {"rope_scaling": YARN | {"factor": None, "beta_fast": None, "beta_slow": 0, "attention_factor": None}},
        None,
        {"rotary_factor": 4.0, "rotary_beta_fast": 32.0, "rotary_beta_slow": 1.0, "rotary_attention_factor": None},
    ),
    "yarn without an original length": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 8, "beta_slow": 2}},
        None,
        {"rotary_original_length": 128, "rotary_beta_fast": 8.0, "rotary_beta_slow": 2.0},
    ),
    "an original length outside": (
        "qwen2",
        {"rope_scaling": YARN, "original_max_position_embeddings": 64},
        None,
        {"rotary_original_length": 64},
    ),
    "llama3 in another family": (
        "qwen3",
        OLD
        | {
            "rope_theta": 90,
            "rope_scaling": {
                "type": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            },
        },
        None,
        {"rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_high_frequency": 4.0, "rotary_original_length": 64},
    ),
    "a part of the head that the default kind ignores": ("mistral", {"partial_rotary_factor": 0.5}, None, {}),
    "as many keys as queries": ("llama", {"num_key_value_heads": 2, "attention_dropout": 0.0}, None, {"kv_heads": 2}),
    "defaults of Llama": ("llama", {"rms_norm_eps": REMOVED, "attention_bias": REMOVED}, None, {"norm_epsilon": 1e-6}),
    "defaults of Mixtral": (
        "mixtral",
        {"rms_norm_eps": REMOVED, "sliding_window": REMOVED},
        None,
        {"norm_epsilon": 1e-5},
    ),
    "defaults of Mistral": ("mistral", {"sliding_window": REMOVED}, None, {"sliding_window": 4096}),
    "a window that is not used": (
        "qwen2",
        {"sliding_window": 4, "use_sliding_window": False},
        None,
        {"sliding_window": None},
    ),
    "a window of all layers": (
        "qwen2",
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0, "layer_types": REMOVED},
        None,
        {"sliding_window": 4},
    ),
    "types of layers before max_window_layers": (
        "qwen3",
        {
            "sliding_window": 4,
            "use_sliding_window": True,
            "max_window_layers": 2,
            "layer_types": ["sliding_attention"] * LAYERS,
        },
        None,
        {"sliding_window": 4},
    ),
    "a window of sparse layers": (  # transformers 5 does not read max_window_layers here
        "qwen3_moe",
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2},
        None,
        {"sliding_window": 4},
    ),
    "yarn without rounding": (
        "llama",
        {"rope_scaling": YARN | {"truncate": False}},
        None,
        {"rotary_scaling": "yarn", "rotary_truncate": False},
    ),
    "yarn with a null for rounding": (
        "llama",
        {"rope_scaling": YARN | {"truncate": None}},
        None,
        {"rotary_scaling": "yarn", "rotary_truncate": False},
    ),
    "some layers with a window": (
        "qwen2",
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2, "layer_types": REMOVED},
        None,
        {"layer_pattern": "global*2,local*2", "kind_fields": ("local.sliding_window=4",)},
    ),
    "types of layers of Mistral": (
        "mistral",
        {"layer_types": ["full_attention"] * LAYERS},
        None,
        {"sliding_window": None},
    ),
    "windows of Mistral by types": (
        "mistral",
        {"layer_types": ["sliding_attention"] * LAYERS},
        None,
        {"sliding_window": 5},
    ),
    "types of layers that Llama ignores": ("llama", {"sliding_window": 3}, None, {"sliding_window": None}),
    "biases that Qwen2 ignores": ("qwen2", {"attention_bias": False, "mlp_bias": True}, None, {"biases": False}),
    "GPT-2 by the usual names": (
        "gpt2",
        {
            "n_layer": REMOVED,
            "num_hidden_layers": 4,
            "n_embd": REMOVED,
            "hidden_size": 16,
            "reorder_and_upcast_attn": True,
        },
        None,
        {"layers": 4, "hidden": 16},
    ),
    "unequal rates": ("gpt2", {"attn_pdrop": 0.0}, None, {"dropout": 0.0}),
    "dropout of attention": ("llama", {"attention_dropout": 0.1}, None, {"dropout": 0.0}),
    "noise of the router": ("mixtral", {"router_jitter_noise": 0.1}, None, {}),
    "experts by the other name": (
        "qwen3_moe",
        {"num_local_experts": REMOVED, "num_experts": 6},
        None,
        {"experts": 6},
    ),
}


def draw(shape: tuple[int, ...]) -> np.ndarray:
    """Small random weights."""
    return 0.3 * np.random.default_rng(7).standard_normal(shape, np.float32)


def rename(prefix: str) -> Callable[[dict], None]:
    """Cuts a prefix off all names."""

    def change(arrays: dict) -> None:
        for name in list(arrays):
            arrays[name.removeprefix(prefix)] = arrays.pop(name)

    return change


def move(old: str, new: str) -> Callable[[dict], None]:
    """Renames a tensor."""
    return lambda arrays: arrays.update({new: arrays.pop(old)})


def cast(**dtypes) -> Callable[[dict], None]:
    """Other dtypes of the tensors whose names contain the keys."""

    def change(arrays: dict) -> None:
        for name in arrays:
            for part, dtype in dtypes.items():
                if part in name:
                    arrays[name] = arrays[name].astype(dtype)

    return change


EMBEDDING, HEAD, WTE = "model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight"
WORDS, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder."
TIED = {"tie_word_embeddings": True}
BUFFERS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    "model.embeddings.position_ids": np.arange(128)[None],
}
TRIANGLE = np.tril(np.ones((1, 1, 80, 80), np.bool_))
# name -> (family, keys, change of the tensors, fields)
TENSORS = {
    "tied, but two tables": ("llama", TIED, None, {"tied_embeddings": False}),
    "tied, but two tables of GPT-2": (
        "gpt2",
        {},
        lambda arrays: arrays.update({HEAD: draw((64, 16))}),
        {"tied_embeddings": False},
    ),
    "tied, and two equal tables": (
        "qwen2",
        {},
        lambda arrays: arrays.update({HEAD: arrays[EMBEDDING].copy()}),
        {"tied_embeddings": True},
    ),
    "tied, and only the head": ("qwen2", {}, move(EMBEDDING, HEAD), {"tied_embeddings": True}),
    "tied by default": ("gpt2", {"tie_word_embeddings": REMOVED}, None, {"tied_embeddings": True}),
    "no prefix": ("qwen2", {}, rename("model."), {}),
    "no prefix, and a head": ("llama", {}, rename("model."), {}),
    "no prefix of GPT-2": ("gpt2", {}, rename("transformer."), {}),
    "buffers": ("mistral", {}, lambda arrays: arrays.update(BUFFERS), {}),
    "masks of GPT-2": ("gpt2", {}, lambda arrays: arrays.update({"transformer.h.0.attn.bias": TRIANGLE}), {}),
    "other float types": ("qwen3", {}, cast(mlp=np.float64, q_proj=np.float16, norm=ml_dtypes.bfloat16), {}),
}


def quantize(
    scales: type = np.float32, name: str = "weight_scale_inv", block: int | None = 128, activations: bool = False
):
    """Linear layers in float8 with random scales of blocks, or of the matrix."""

    def change(arrays: dict) -> None:
        draw = np.random.default_rng(3)
        for weight in [one for one in arrays if one.endswith("proj.weight")]:
            sizes = arrays[weight].shape
            shape = tuple(-(-size // block) for size in sizes) if block else ()
            factors = np.asarray(
                2.0 ** draw.integers(-4, 0, shape) if scales != np.float32 else draw.uniform(0.1, 1, shape)
            )
            wide = factors if not block else factors.repeat(block, 0)[: sizes[0]].repeat(block, 1)[:, : sizes[1]]
            arrays[weight] = (arrays[weight] / wide).astype(F8)
            stem = weight.removesuffix("weight")
            stored = np.log2(factors) + 127 if scales == np.uint8 else factors
            arrays[stem + name] = np.asarray(stored).astype(scales)
            if activations:
                arrays[stem + "activation_scale"] = np.ones((), np.float32)

    return change


def with_fp8(block: int | None = 128, **keys) -> dict:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": block and [block, block], **keys}}


# Blocks of 4 and 8 divide the sizes of the golden models, so that transformers divides as we do.
QUANTIZED = {
    "blocks of DeepSeek-V3": ("llama", with_fp8(4), quantize(block=4), {}),
    "a block larger than the matrix": ("qwen3", with_fp8(128), quantize(block=128), {}),
    "experts": ("qwen3_moe", with_fp8(4), quantize(block=4), {}),
    "factors of two": ("qwen2", with_fp8(4, scale_fmt="ue8m0"), quantize(E8, block=4), {}),
    "exponents as bytes": ("qwen2", with_fp8(4), quantize(np.uint8, block=4), {}),
    "a factor of the matrix": (
        "mistral",
        with_fp8(None, activation_scheme="static"),
        quantize(block=None, activations=True),
        {},
    ),
    "factors by another name": ("llama", with_fp8(4), quantize(name="scale", block=4), {}),
}
TABLE = {"type": "linear", "factor": 2.0}
# name -> (family, keys, change of the tensors, words of the message)
REFUSED = {
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, "rope_type = 'dynamic'"),
    "longrope of no numbers": (
        "llama",
        {"rope_scaling": LONG | {"long_factor": ["2", "3", "4", "5"]}},
        None,
        "long_factor = .* is not supported",
    ),
    "longrope without a length": (
        "llama",
        {"rope_scaling": LONG | {"original_max_position_embeddings": None}},
        None,
        "has no original_max_position_embeddings",
    ),
    "longrope of some pairs": (
        "llama",
        {"rope_scaling": LONG | {"long_factor": [2.0]}},
        None,
        "long_factor = .* is not supported",
    ),
    "an unknown kind": ("llama", {"rope_scaling": {"type": "su"}}, None, "rope_type = 'su' is not supported"),
    "a part of the head": (
        "llama",
        {"rope_scaling": TABLE, "partial_rotary_factor": 0.5},
        None,
        "partial_rotary_factor",
    ),
    "no factor": ("llama", {"rope_scaling": {"type": "linear"}}, None, "transformers refuses it .*'factor'"),
    "a scaling for each type": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        None,
        "rope_parameters = .* is not supported",
    ),
    "types of layers": (
        "mistral",
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        None,
        "layer_types = .* is not supported",
    ),
    "types of layers of a family without windows": (
        "llama",
        {"sliding_window": 4, "layer_types": ["sliding_attention"] * LAYERS},
        None,
        "layer_types = .* is not supported",
    ),
    "types of layers without a window": (
        "mixtral",
        {"layer_types": ["sliding_attention"] * LAYERS},
        None,
        "layer_types = .* is not supported",
    ),
    "a configuration for each layer": (
        "llama",
        {"per_layer_config": {"0": {"hidden_act": "gelu"}}},
        None,
        "per_layer_config",
    ),
    "more layers than can be listed": (
        "qwen2",
        {"num_hidden_layers": 10**9},
        None,
        "num_hidden_layers = 1000000000 is not",
    ),
    "weights of another name": (
        "llama",
        {"transformers_weights": "b.safetensors"},
        None,
        "transformers_weights = 'b.saf",
    ),
    "biases of attention alone": ("llama", {"attention_bias": True}, None, "attention_bias = True is not supported"),
    "biases of the MLP alone": ("llama", {"mlp_bias": True}, None, "mlp_bias = True is not supported"),
    "a bool as text": ("llama", {"tie_word_embeddings": "false"}, None, "'tie_word_embeddings' expected bool, got str"),
    "a base as text": ("llama", OLD | {"rope_theta": "1e6"}, None, "rope_theta = '1e6' must be a float"),
    "no heads": ("llama", {"num_attention_heads": 0, "head_dim": None}, None, "config.json: transformers refuses it"),
    "not tied, and no head": ("qwen2", {"tie_word_embeddings": False}, None, "has no tensor lm_head.weight"),
    "biases without the flag": (
        "llama",
        {},
        lambda arrays: arrays.update({"model.layers.0.self_attn.q_proj.bias": draw(32)}),
        "has a tensor model.layers.0.self_attn.q_proj.bias, which llama with this configuration does not",
    ),
    "the flag without biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        None,
        "has no tensor model.layers.0.self_attn.[a-z]_proj.bias",
    ),
    "norms of queries": (
        "qwen2",
        {},
        lambda arrays: arrays.update({"model.layers.0.self_attn.q_norm.weight": draw(4)}),
        "has a tensor model.layers.0.self_attn.q_norm.weight",
    ),
    "no norms of queries": (
        "qwen3",
        {},
        lambda arrays: arrays.pop("model.layers.1.self_attn.q_norm.weight"),
        "has no tensor model.layers.1.self_attn.q_norm.weight",
    ),
    "fewer layers than the file": ("llama", {"num_hidden_layers": 3}, None, "has a tensor model.layers.3"),
    "a larger vocabulary": ("llama", {"vocab_size": 65}, None, r"has shape \(64, 16\), and this model's is \(65"),
    "whole numbers": ("llama", {}, cast(q_proj=np.int8), "q_proj.weight has dtype int8: only F32"),
    "float8 without scales": (
        "llama",
        with_fp8(),
        lambda arrays: arrays.update({HEAD: arrays[HEAD].astype(F8)}),
        "has no scale of lm_head.weight, lm_head.weight_scale_inv",
    ),
    "scales without a flag": ("llama", {}, quantize(), "has a tensor .*weight_scale_inv, which llama"),
    "scales of another shape": ("llama", with_fp8(5), quantize(block=7), "scale of .* has shape .* which does not fit"),
    "a block of no size": ("llama", with_fp8() | with_fp8(-1), quantize(), "weight_block_size = .* must be two sizes"),
    **{
        method: (
            "llama",
            {"quantization_config": {"quant_method": method}},
            None,
            f"quantised by '{method}' are not read, only fp8 and mxfp4: ",
        )
        for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "torchao", "fbgemm_fp8")
    },
    "an old bitsandbytes": (
        "llama",
        {"quantization_config": {"load_in_8bit": True}},
        None,
        "quantised by 'load_in_8bit' are not read.*model.dequantize",
    ),
    "two tables of BERT": (
        "bert",
        {},
        lambda arrays: arrays.update({DECODER + "weight": draw(arrays[WORDS].shape)}),
        "cls.predictions.decoder.weight is not tied to the embedding, but has other values",
    ),
    "two biases of BERT": (
        "bert",
        {},
        lambda arrays: arrays.update({DECODER + "bias": 1 + arrays["cls.predictions.bias"]}),
        "cls.predictions.decoder.bias is not tied",
    ),
}

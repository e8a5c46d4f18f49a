"""The family that `transformers` calls modernbert (2412.13663), with its head for masked words: keys and tensors."""

from typing import Any

from megajax.config import BertConfig
from megajax.config.layer_pattern import variant_numbers, variants
from megajax.interop.hugging_face.keys import GATED, SIZES, Family, Keys, read_fields, write_fields
from megajax.interop.hugging_face.llama_families import read_rotary, write_rotary
from megajax.interop.hugging_face.tensors import Piece, Table, fused_qkv, linear_pieces, norm_pieces
from megajax.interop.hugging_face.windows import FULL, SLIDING, layer_types, of_kinds, type_of

__all__ = ["MODERNBERT", "MODERNBERT_FAMILY"]

ARCHITECTURE = "ModernBertForMaskedLM"
PADDING = 50283  # transformers' default of pad_token_id
NAMES = {**SIZES, "norm_epsilon": "norm_eps"}
FIXED = {
    "positions": "rotary",
    "token_types": 0,
    "embedding_norm": True,
    "first_attention_norm": False,
    "output_heads": "masked_lm",
}
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")  # the block has all or none
ACTIVATIONS = GATED | dict.fromkeys(("gelu", "gelu_python"), "geglu_exact")
WRITTEN = {"geglu": "gelu_pytorch_tanh", "swiglu": "silu"}  # geglu_exact: gelu


def _read(keys: Keys) -> dict[str, Any]:
    keys.require("architectures", [ARCHITECTURE])
    keys.require("tie_word_embeddings", True)
    for key in ("attention_dropout", "embedding_dropout", "mlp_dropout"):
        keys.idle(key)
    biases = keys.get(BIASES[0], bool)
    for key in BIASES:
        keys.require(key, biases)
    activation = keys.get("hidden_activation", str)
    if activation not in ACTIVATIONS:
        keys.refuse("hidden_activation")
    keys.require(
        "classifier_activation", *(name for name in ACTIVATIONS if ACTIVATIONS[name] == ACTIVATIONS[activation])
    )
    own = {"masked_lm_bias": keys.get("decoder_bias", bool), "biases": biases, "activation": ACTIVATIONS[activation]}
    return FIXED | read_fields(keys, NAMES) | own | _read_layers(keys)


def _read_layers(keys: Keys) -> dict[str, Any]:
    """Windows and rotations. local_attention / 2 is the largest distance that a window has, rounded down."""
    rope = Keys(keys.get("rope_parameters", dict), f"{keys.path}: rope_parameters")
    if keys.get("local_attention", int) < 0:
        keys.refuse("local_attention")
    windows = {SLIDING: keys.get("local_attention", int) // 2 + 1, FULL: None}
    types = layer_types(Keys(keys.values | {"sliding_window": windows[SLIDING]}, keys.path))
    names, each = {SLIDING: "sliding", FULL: "full"}, {}
    for kind in dict.fromkeys(types):
        own = Keys(rope.get(kind, dict), f"{rope.path}: {kind}")
        each[names[kind]] = read_rotary(keys, own) | {"positions": "rotary", "sliding_window": windows[kind]}
    return of_kinds([names[kind] for kind in types], each)


def _write(model: BertConfig) -> dict[str, Any]:
    each, activation = variants(model), WRITTEN.get(model.activation, "gelu")
    of = lambda kind: next((one for one in each if type_of(one) == kind), model)  # noqa: E731
    return {
        **write_fields(model, NAMES),
        **dict.fromkeys(BIASES, model.biases),
        **dict.fromkeys(("hidden_activation", "classifier_activation"), activation),
        "decoder_bias": model.has_masked_lm_bias,
        "layer_types": [type_of(each[number]) for number in variant_numbers(model)],
        "rope_parameters": {kind: write_rotary(of(kind)) for kind in (FULL, SLIDING)},
        "local_attention": 2 * (of(SLIDING).sliding_window or 1) - 2,
        "tie_word_embeddings": True,
        **({"pad_token_id": None} if model.vocabulary <= PADDING else {}),
    }


MODERNBERT_FAMILY = Family("modernbert", ARCHITECTURE, _read, _write, BertConfig)

LAYER = "model.layers.{}."
MODERNBERT = Table(
    {
        "shared/embedding/tokens": (Piece("model.embeddings.tok_embeddings.weight", "v h", "vh"),),
        **norm_pieces("shared/embedding/norm", "model.embeddings.norm"),
        **norm_pieces("blocks/attention_norm", f"{LAYER}attn_norm", absent=1),
        "blocks/attention/qkv/kernel": fused_qkv(f"{LAYER}attn.Wqkv.weight"),
        "blocks/attention/qkv/bias": fused_qkv(f"{LAYER}attn.Wqkv.bias", ""),
        **linear_pieces("blocks/attention/output", f"{LAYER}attn.Wo", "h ad", "adh"),
        **norm_pieces("blocks/feedforward_norm", f"{LAYER}mlp_norm"),
        **linear_pieces("blocks/feedforward/up", f"{LAYER}mlp.Wi", "zf h", "hzf"),
        **linear_pieces("blocks/feedforward/down", f"{LAYER}mlp.Wo", "h f", "fh"),
        **norm_pieces("shared/head/norm", "model.final_norm"),
        **linear_pieces("shared/head/transform", "head.dense", "e h", "he"),
        **norm_pieces("shared/head/transform_norm", "head.norm"),
        "shared/head/bias": (Piece("decoder.bias", "v", "v"),),
    },
    prefix="model.",
    ignored=(),
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)

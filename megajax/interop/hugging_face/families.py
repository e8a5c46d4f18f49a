"""The families that `transformers` calls gpt2, bert and megatron-bert, and a table of all families: keys of config.json to
fields of `ModelConfig` or `BertConfig`, and back.

A family reads the keys that its model in transformers computes with, after transformers' own normalisation (`read_config`),
which has its defaults. Others are ignored, as there. A value that the block cannot compute is an error that names its key.
`write` gives the same keys, all of them, so that reading them back needs no library.
"""

from functools import partial
from typing import Any

from megajax.config import BertConfig, ModelConfig
from megajax.interop.hugging_face.expert_families import SPARSE_FAMILIES
from megajax.interop.hugging_face.keys import PLAIN, Family, Keys
from megajax.interop.hugging_face.llama_families import LLAMA_FAMILIES

__all__ = ["FAMILIES"]

# GPT-2.


def _read_gpt2(keys: Keys) -> dict[str, Any]:
    keys.require("scale_attn_weights", True)
    keys.require("scale_attn_by_inverse_layer_idx", False)
    keys.require("add_cross_attention", False)
    activation = keys.get("activation_function", str)
    if activation not in PLAIN:
        keys.refuse("activation_function")
    return {
        "layers": keys.get("n_layer", int),
        "hidden": keys.get("n_embd", int),
        "heads": keys.get("n_head", int),
        "feedforward": keys.get("n_inner", int, None),
        "vocabulary": keys.get("vocab_size", int),
        "sequence_length": keys.get("n_positions", int),
        "dropout": keys.rate("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "activation": PLAIN[activation],
        "tied_embeddings": keys.get("tie_word_embeddings", bool),
        "init_deviation": keys.get("initializer_range", float),
        "norm_epsilon": keys.get("layer_norm_epsilon", float),
    }


def _write_gpt2(model: ModelConfig) -> dict[str, Any]:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    return rates | {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.feedforward_size,
        "vocab_size": model.vocabulary,
        "n_positions": model.sequence_length,
        "activation_function": "gelu" if model.activation == "gelu_exact" else "gelu_new",
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_deviation,
        "layer_norm_epsilon": model.norm_epsilon,
    }


# BERT: the original one, and Megatron-LM's, whose norms are before attention and MLP. The heads are told by the class.
BERT_HEADS = {
    "ForPreTraining": "masked_lm_and_order",
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "classification",
    "ForMultipleChoice": "multiple_choice",
    "ForQuestionAnswering": "spans",
    "Model": "none",
}


def _read_bert(keys: Keys, prefix: str, post_norm: bool) -> dict[str, Any]:
    keys.require("position_embedding_type", "absolute")  # transformers 5 does not read it, and computes another model
    keys.require("is_decoder", False)
    keys.require("add_cross_attention", False)
    activation = keys.get("hidden_act", str)
    if activation not in PLAIN:
        keys.refuse("hidden_act")
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    classes = {prefix + name: heads for name, heads in BERT_HEADS.items()}
    architecture = (keys.get("architectures", list, None) or [prefix + "Model"])[0]
    if architecture not in classes:
        keys.refuse("architectures")
    heads = classes[architecture]
    if heads.startswith("masked_lm"):  # other heads have no table of words
        keys.require("tie_word_embeddings", True)  # transformers 5 has two biases in an untied head, transformers 4 one
    return {
        "layers": keys.get("num_hidden_layers", int),
        "hidden": keys.get("hidden_size", int),
        "heads": keys.get("num_attention_heads", int),
        "feedforward": keys.get("intermediate_size", int),
        "vocabulary": keys.get("vocab_size", int),
        "sequence_length": keys.get("max_position_embeddings", int),
        "dropout": keys.rate(
            *rates, *(["classifier_dropout"] if keys.values.get("classifier_dropout") is not None else [])
        ),
        "activation": PLAIN[activation],
        "init_deviation": keys.get("initializer_range", float),
        "norm_epsilon": keys.get("layer_norm_eps", float),
        "token_types": keys.get("type_vocab_size", int),
        "post_norm": post_norm,
        "output_heads": heads,
        "classes": len(keys.get("id2label", dict, None) or ("LABEL_0", "LABEL_1")),  # `write` has them for heads only
    }


def _write_bert(model: BertConfig, prefix: str) -> dict[str, Any]:
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model.dropout)
    count = {"classification": model.classes, "spans": 2}.get(model.output_heads, 0)  # outputs of transformers' head
    labels = {"id2label": {str(number): f"LABEL_{number}" for number in range(count)}}
    keys = rates | {
        "architectures": [prefix + name for name, heads in BERT_HEADS.items() if heads == model.output_heads],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.feedforward_size,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.sequence_length,
        "type_vocab_size": model.token_types,
        "hidden_act": "gelu" if model.activation == "gelu_exact" else "gelu_new",
        "tie_word_embeddings": True,
        "initializer_range": model.init_deviation,
        "layer_norm_eps": model.norm_epsilon,
    }
    return keys | labels if count else keys


def _bert(name: str, prefix: str, post_norm: bool) -> Family:
    read, write = partial(_read_bert, prefix=prefix, post_norm=post_norm), partial(_write_bert, prefix=prefix)
    return Family(name, prefix + "ForPreTraining", read, write, BertConfig)


FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", _read_gpt2, _write_gpt2),
        *LLAMA_FAMILIES,
        *SPARSE_FAMILIES,
        _bert("bert", "Bert", post_norm=True),
        _bert("megatron-bert", "MegatronBert", post_norm=False),
    )
}

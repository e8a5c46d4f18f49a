"""The families that `transformers` calls gpt2, bert and megatron-bert, and a table of all families: keys of config.json to
fields of `ModelConfig` or `BertConfig`, and back.

A family reads the keys that its model in transformers computes with, after transformers' own normalisation (`read_config`),
which has its defaults. Others are ignored, as there. A value that the block cannot compute is an error that names its key.
`write` gives the same keys, all of them, so that reading them back needs no library.
"""

from functools import partial
from typing import Any

from megajax.config import BertConfig, ModelConfig
from megajax.interop.hugging_face.described_families import DESCRIBED_FAMILIES
from megajax.interop.hugging_face.expert_families import SPARSE_FAMILIES
from megajax.interop.hugging_face.keys import PLAIN, SIZES, Family, Keys, read_fields, write_fields
from megajax.interop.hugging_face.llama_families import LLAMA_FAMILIES
from megajax.interop.hugging_face.modernbert_family import MODERNBERT_FAMILY
from megajax.interop.hugging_face.nemotron_family import NEMOTRON_H_FAMILY
from megajax.interop.hugging_face.recurrent_families import MAMBA2_FAMILY

__all__ = ["FAMILIES"]

# GPT-2.
GPT2 = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "vocabulary": "vocab_size",
    "sequence_length": "n_positions",
    "tied_embeddings": "tie_word_embeddings",
    "init_deviation": "initializer_range",
    "norm_epsilon": "layer_norm_epsilon",
}


def _read_gpt2(keys: Keys) -> dict[str, Any]:
    keys.require("scale_attn_weights", True)
    keys.require("scale_attn_by_inverse_layer_idx", False)
    keys.require("add_cross_attention", False)
    activation = keys.get("activation_function", str)
    if activation not in PLAIN:
        keys.refuse("activation_function")
    return read_fields(keys, GPT2) | {
        "feedforward": keys.get("n_inner", int, None),
        "dropout": keys.rate("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "activation": PLAIN[activation],
    }


def _write_gpt2(model: ModelConfig) -> dict[str, Any]:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    activation = "gelu" if model.activation == "gelu_exact" else "gelu_new"
    return rates | write_fields(model, GPT2) | {"n_inner": model.feedforward_size, "activation_function": activation}


# BERT: the original one, and Megatron-LM's, whose norms are before attention and MLP. The heads are told by the class.
BERT = {**SIZES, "norm_epsilon": "layer_norm_eps", "token_types": "type_vocab_size"}
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
    if keys.values.get("classifier_dropout") is not None:
        rates += ("classifier_dropout",)
    return read_fields(keys, BERT) | {
        "dropout": keys.rate(*rates),
        "activation": PLAIN[activation],
        "post_norm": post_norm,
        "output_heads": heads,
        "classes": len(keys.get("id2label", dict, None) or ("LABEL_0", "LABEL_1")),  # `write` has them for heads only
    }


def _write_bert(model: BertConfig, prefix: str) -> dict[str, Any]:
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model.dropout)
    count = {"classification": model.classes, "spans": 2}.get(model.output_heads, 0)  # outputs of transformers' head
    labels = {"id2label": {str(number): f"LABEL_{number}" for number in range(count)}}
    keys = rates | write_fields(model, BERT)
    keys |= {
        "architectures": [prefix + name for name, heads in BERT_HEADS.items() if heads == model.output_heads],
        "hidden_act": "gelu" if model.activation == "gelu_exact" else "gelu_new",
        "tie_word_embeddings": True,
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
        *DESCRIBED_FAMILIES,
        MAMBA2_FAMILY,
        NEMOTRON_H_FAMILY,
        _bert("bert", "Bert", post_norm=True),
        _bert("megatron-bert", "MegatronBert", post_norm=False),
        MODERNBERT_FAMILY,
    )
}

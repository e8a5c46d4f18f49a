"""Whether two transformers have the same parameters, so that one can resume from the other's checkpoint."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from megajax.config.bert import BertConfig
from megajax.config.layer_kinds import model_kinds
from megajax.config.layer_pattern import variant_numbers, variants
from megajax.config.lora import lora_targets
from megajax.config.model import ModelConfig

__all__ = ["changed_parameters"]


def changed_parameters(was: Mapping[str, Any], now: ModelConfig, differing: Iterable[str]) -> list[str]:
    """The fields through which a model has other parameters than a stored one: other names, shapes or layers of a kind.

    What only changes how they are used is none of them: the length of a sample, rotary frequencies, the window, the
    experts' balance and capacity.

    Args:
      was: the stored fields by name; one that is missing has its default.
      now: the model.
      differing: the names of the fields that differ.

    Returns:
      Those of `differing` that change the parameters by themselves; all, if none does so alone, or if the stored model is
      not a legal one. Empty: the parameters are the same.
    """
    differing, fields = list(differing), dataclasses.asdict(now)
    stored = _parameters_of(was, now)
    if stored is not None and stored == _parameters_of(fields, now):
        return []
    alone = [
        name for name in differing if stored is None or _parameters_of({**was, name: fields.get(name)}, now) != stored
    ]
    return alone or differing


def _parameters_of(fields: Mapping[str, Any], kind: ModelConfig) -> dict[str, Any] | None:
    """Of a model of these fields; None if there is no such model."""
    try:
        return _parameters(type(kind)(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}))
    except Exception:  # a damaged or foreign configuration, whose values are of any type
        return None


def _parameters(model: ModelConfig) -> dict[str, Any]:
    """What the names and shapes of a transformer's parameters depend on."""
    found = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": (model.heads, model.head_dimension, model.key_value_heads),
        "latent": (model.kv_latent, model.query_latent, model.rotary_head_size, model.value_dimension),
        "feedforward": (model.feedforward_size, model.is_gated),
        "vocabulary": (model.vocabulary, model.tied_embeddings),
        "positions": model.sequence_length if model.positions == "learned" else None,
        "biases": (model.biases, model.has_qkv_biases, model.has_output_biases, model.attention_sinks),
        "norm_placement": model.norm_placement,
        "norm": (model.norm_parameters, model.embedding_norm),
        "attention_gate": model.attention_gate,
        "query_key_norm": model.query_key_norm and model.query_key_norm_over,
        "experts": model.experts,
        "mtp_num_layers": model.mtp_num_layers,
        "lora": (model.lora, lora_targets(model.of_kind("dense") if model.layer_kinds else model)),
    }
    if model.mixers != ("attention",):  # also where layers with a mixer have no MLP
        kinds = [variants(model)[n].mixer for n in variant_numbers(model)]
        states = model.state_heads, model.state_head_size, model.recurrent_groups, model.recurrent_state
        found["mixer"] = (kinds, *states, model.recurrent_convolution)
    if model.experts:
        dense = model.of_kind("dense").feedforward_size if model.layer_kinds else None
        found["experts"] = (model.experts, model_kinds(model), dense, model.shared_feedforward)
        found["experts"] += (model.shared_gate, model.expert_biases)
    if isinstance(model, BertConfig):
        scores = model.scores if model.has_classifier else None
        found["bert"] = (model.token_types, model.post_norm, model.output_heads, scores, model.has_masked_lm_bias)
    return found

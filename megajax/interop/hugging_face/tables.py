"""Which tensors of Hugging Face are which leaves of the parameters: one table per family, used in both directions.

Megatron-LM's tensors are two more families, which are only read (`megatron/tensors.py`). Families with a description have
their tensors in it (`described_families.py`).
"""

import dataclasses
from collections.abc import Mapping

from megajax.interop.hugging_face.described_families import DESCRIPTIONS
from megajax.interop.hugging_face.modernbert_family import MODERNBERT
from megajax.interop.hugging_face.nemotron_family import NEMOTRON_H
from megajax.interop.hugging_face.recurrent_families import MAMBA2
from megajax.interop.hugging_face.tensors import (
    GATE,
    KEY,
    NORM,
    QUERIES,
    UP,
    VALUE,
    Piece,
    Table,
    expert_pieces,
    linear_pieces,
    norm_pieces,
    shared_expert_pieces,
)

__all__ = ["LLAMA", "LLAMA_LAYER", "QWEN3_MOE", "TABLES"]

LLAMA_LAYER = "model.layers.{}."
LLAMA = Table(
    {
        "shared/embedding/tokens": (Piece("model.embed_tokens.weight", "v h", "vh"),),
        **norm_pieces("shared/head/norm", "model.norm"),
        "shared/head/vocabulary": (Piece("lm_head.weight", "v h", "vh"),),
        **norm_pieces("blocks/attention_norm", LLAMA_LAYER + "input_layernorm"),
        "blocks/attention/qkv/kernel": (
            Piece(LLAMA_LAYER + "self_attn.q_proj.weight", "gnd h", "hgnd", QUERIES),
            Piece(LLAMA_LAYER + "self_attn.k_proj.weight", "gd h", "hg1d", KEY),
            Piece(LLAMA_LAYER + "self_attn.v_proj.weight", "gd h", "hg1d", VALUE),
        ),
        "blocks/attention/qkv/bias": (
            Piece(LLAMA_LAYER + "self_attn.q_proj.bias", "gnd", "gnd", QUERIES),
            Piece(LLAMA_LAYER + "self_attn.k_proj.bias", "gd", "g1d", KEY),
            Piece(LLAMA_LAYER + "self_attn.v_proj.bias", "gd", "g1d", VALUE),
        ),
        "blocks/attention/query_norm/scale": (Piece(LLAMA_LAYER + "self_attn.q_norm.weight", "d", "d"),),
        "blocks/attention/key_norm/scale": (Piece(LLAMA_LAYER + "self_attn.k_norm.weight", "d", "d"),),
        "blocks/attention/output/kernel": (Piece(LLAMA_LAYER + "self_attn.o_proj.weight", "h ad", "adh"),),
        "blocks/attention/output/bias": (Piece(LLAMA_LAYER + "self_attn.o_proj.bias", "h", "h"),),
        **norm_pieces("blocks/feedforward_norm", LLAMA_LAYER + "post_attention_layernorm"),
        "blocks/feedforward/up/kernel": (
            Piece(LLAMA_LAYER + "mlp.gate_proj.weight", "f h", "h1f", GATE),
            Piece(LLAMA_LAYER + "mlp.up_proj.weight", "f h", "h1f", UP),
        ),
        "blocks/feedforward/up/bias": (
            Piece(LLAMA_LAYER + "mlp.gate_proj.bias", "f", "1f", GATE),
            Piece(LLAMA_LAYER + "mlp.up_proj.bias", "f", "1f", UP),
        ),
        "blocks/feedforward/down/kernel": (Piece(LLAMA_LAYER + "mlp.down_proj.weight", "h f", "fh"),),
        "blocks/feedforward/down/bias": (Piece(LLAMA_LAYER + "mlp.down_proj.bias", "h", "h"),),
    },
    prefix="model.",
    ignored=("rotary_emb.inv_freq", "position_ids"),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


def _sparse(mlp: str, gate: str, up: str, down: str) -> dict[str, tuple[Piece, ...]]:
    """Llama's leaves with experts in place of the MLP, whose tensors begin with `mlp` in each layer."""
    kept = {name: pieces for name, pieces in LLAMA.leaves.items() if not name.startswith("blocks/feedforward/")}
    return kept | expert_pieces(LLAMA_LAYER + mlp, gate, up, down)


MIXTRAL = dataclasses.replace(LLAMA, leaves=_sparse("block_sparse_moe.", "w1", "w3", "w2"))
QWEN3_MOE = dataclasses.replace(LLAMA, leaves=_sparse("mlp.", "gate_proj", "up_proj", "down_proj"))
_SHARED = LLAMA_LAYER + "mlp.shared_expert"
QWEN2_MOE = dataclasses.replace(
    QWEN3_MOE, leaves={**QWEN3_MOE.leaves, **shared_expert_pieces(f"{_SHARED}.", f"{_SHARED}_gate")}
)
OLMOE = dataclasses.replace(  # norms over all heads
    QWEN3_MOE,
    leaves={
        **QWEN3_MOE.leaves,
        "blocks/attention/query_norm/scale": (Piece(LLAMA_LAYER + "self_attn.q_norm.weight", "gnd", "gnd"),),
        "blocks/attention/key_norm/scale": (Piece(LLAMA_LAYER + "self_attn.k_norm.weight", "gd", "gd"),),
    },
)
GPT2_LAYER = "transformer.h.{}."
GPT2 = Table(
    {
        "shared/embedding/tokens": (Piece("transformer.wte.weight", "v h", "vh"),),
        "shared/embedding/positions": (Piece("transformer.wpe.weight", "s h", "sh"),),
        **norm_pieces("shared/head/norm", "transformer.ln_f"),
        "shared/head/vocabulary": (Piece("lm_head.weight", "v h", "vh"),),
        **norm_pieces("blocks/attention_norm", GPT2_LAYER + "ln_1"),
        "blocks/attention/qkv/kernel": (Piece(GPT2_LAYER + "attn.c_attn.weight", "h qgd", "hgqd"),),
        "blocks/attention/qkv/bias": (Piece(GPT2_LAYER + "attn.c_attn.bias", "qgd", "gqd"),),
        "blocks/attention/output/kernel": (Piece(GPT2_LAYER + "attn.c_proj.weight", "ad h", "adh"),),
        "blocks/attention/output/bias": (Piece(GPT2_LAYER + "attn.c_proj.bias", "h", "h"),),
        **norm_pieces("blocks/feedforward_norm", GPT2_LAYER + "ln_2"),
        "blocks/feedforward/up/kernel": (Piece(GPT2_LAYER + "mlp.c_fc.weight", "h f", "hf"),),
        "blocks/feedforward/up/bias": (Piece(GPT2_LAYER + "mlp.c_fc.bias", "f", "f"),),
        "blocks/feedforward/down/kernel": (Piece(GPT2_LAYER + "mlp.c_proj.weight", "f h", "fh"),),
        "blocks/feedforward/down/bias": (Piece(GPT2_LAYER + "mlp.c_proj.bias", "h", "h"),),
    },
    prefix="transformer.",
    ignored=("attn.bias", "attn.masked_bias", "position_ids"),
    tied={"lm_head.weight": "transformer.wte.weight"},
)
MEGATRON_LAYER = "decoder.layers.{}."


def _megatron(up: Mapping[str, tuple[Piece, ...]]) -> Table:
    """megatron-core's names, those of layers with TransformerEngine; `up`: of the MLP's first matmul."""
    attention, mlp = MEGATRON_LAYER + "self_attention.", MEGATRON_LAYER + "mlp."
    norms = {"attention_norm": attention + "linear_qkv", "feedforward_norm": mlp + "linear_fc1"}
    leaves = {
        "shared/embedding/tokens": (Piece("embedding.word_embeddings.weight", "v h", "vh"),),
        "shared/embedding/positions": (Piece("embedding.position_embeddings.weight", "s h", "sh"),),
        **norm_pieces("shared/head/norm", "decoder.final_layernorm"),
        "shared/head/vocabulary": (Piece("output_layer.weight", "v h", "vh"),),
        **{
            f"blocks/{ours}/{name}": (Piece(f"{theirs}.layer_norm_{torch}", "h", "h"),)
            for ours, theirs in norms.items()
            for name, torch in NORM.items()
        },
        "blocks/attention/qkv/kernel": (Piece(attention + "linear_qkv.weight", "gpd h", "hgpd"),),
        "blocks/attention/qkv/bias": (Piece(attention + "linear_qkv.bias", "gpd", "gpd"),),
        "blocks/attention/query_norm/scale": (Piece(attention + "q_layernorm.weight", "d", "d"),),
        "blocks/attention/key_norm/scale": (Piece(attention + "k_layernorm.weight", "d", "d"),),
        "blocks/attention/output/kernel": (Piece(attention + "linear_proj.weight", "h ad", "adh"),),
        "blocks/attention/output/bias": (Piece(attention + "linear_proj.bias", "h", "h"),),
        "blocks/feedforward/down/kernel": (Piece(mlp + "linear_fc2.weight", "h f", "fh"),),
        "blocks/feedforward/down/bias": (Piece(mlp + "linear_fc2.bias", "h", "h"),),
        **up,
    }
    return Table(leaves, prefix="", ignored=())


FC1 = MEGATRON_LAYER + "mlp.linear_fc1."
MEGATRON = _megatron(
    {
        "blocks/feedforward/up/kernel": (Piece(FC1 + "weight", "f h", "hf"),),
        "blocks/feedforward/up/bias": (Piece(FC1 + "bias", "f", "f"),),
    }
)
MEGATRON_GATED = _megatron(
    {
        "blocks/feedforward/up/kernel": (
            Piece(FC1 + "weight_w", "f h", "h1f", GATE),
            Piece(FC1 + "weight_v", "f h", "h1f", UP),
        ),
        "blocks/feedforward/up/bias": (
            Piece(FC1 + "bias_w", "f", "1f", GATE),
            Piece(FC1 + "bias_v", "f", "1f", UP),
        ),
    }
)

BERT_HEADS = (
    "pooler.dense",
    "seq_relationship",
    "classifier",
    "qa_outputs",
    "predictions.transform.dense",
    "predictions.transform.LayerNorm",
)


def _bert(norms: Mapping[str, str]) -> Table:
    """The tensors of a BERT; `norms`: leaves of norms -> their tensors, which differ between the two families."""
    layer, head = "bert.encoder.layer.{}.", "cls.predictions."
    attention = layer + "attention.self."

    return Table(
        {
            "shared/embedding/tokens": (Piece("bert.embeddings.word_embeddings.weight", "v h", "vh"),),
            "shared/embedding/positions": (Piece("bert.embeddings.position_embeddings.weight", "s h", "sh"),),
            "shared/embedding/types": (Piece("bert.embeddings.token_type_embeddings.weight", "t h", "th"),),
            "blocks/attention/qkv/kernel": (
                Piece(attention + "query.weight", "gnd h", "hgnd", QUERIES),
                Piece(attention + "key.weight", "gd h", "hg1d", KEY),
                Piece(attention + "value.weight", "gd h", "hg1d", VALUE),
            ),
            "blocks/attention/qkv/bias": (
                Piece(attention + "query.bias", "gnd", "gnd", QUERIES),
                Piece(attention + "key.bias", "gd", "g1d", KEY),
                Piece(attention + "value.bias", "gd", "g1d", VALUE),
            ),
            **linear_pieces("blocks/attention/output", layer + "attention.output.dense", "h ad", "adh"),
            **linear_pieces("blocks/feedforward/up", layer + "intermediate.dense", "f h", "hf"),
            **linear_pieces("blocks/feedforward/down", layer + "output.dense", "h f", "fh"),
            **linear_pieces("shared/head/pooler", "bert.pooler.dense", "e h", "he"),
            **linear_pieces("shared/head/transform", head + "transform.dense", "e h", "he"),
            **norm_pieces("shared/head/transform_norm", head + "transform.LayerNorm"),
            "shared/head/bias": (Piece(head + "bias", "v", "v"),),
            **linear_pieces("shared/head/order", "cls.seq_relationship", "o h", "ho"),
            **linear_pieces("shared/head/classifier", "classifier", "c h", "hc"),
            **linear_pieces("shared/head/spans", "qa_outputs", "o h", "ho"),
            **{name: piece for ours, theirs in norms.items() for name, piece in norm_pieces(ours, theirs).items()},
        },
        prefix="bert.",
        ignored=(
            *("embeddings.position_ids", "predictions.decoder.weight", "predictions.decoder.bias", "predictions.bias"),
            *(f"{name}.{kind}" for name in BERT_HEADS for kind in ("weight", "bias")),
        ),
        renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        tied={head + "decoder.weight": "bert.embeddings.word_embeddings.weight", head + "decoder.bias": head + "bias"},
    )


BERT = _bert(
    {
        "shared/embedding/norm": "bert.embeddings.LayerNorm",
        "blocks/attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
        "blocks/feedforward_norm": "bert.encoder.layer.{}.output.LayerNorm",
    }
)
MEGATRON_BERT = _bert(  # norms before attention and MLP
    {
        "blocks/attention_norm": "bert.encoder.layer.{}.attention.ln",
        "blocks/feedforward_norm": "bert.encoder.layer.{}.ln",
        "shared/head/norm": "bert.encoder.ln",
    }
)
TABLES = {
    **{one.name: one.table(LLAMA) for one in DESCRIPTIONS},
    "gpt2": GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMA),
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "mamba2": MAMBA2,
    "nemotron_h": NEMOTRON_H,
    "megatron": MEGATRON,
    "megatron_gated": MEGATRON_GATED,
    "bert": BERT,
    "megatron-bert": MEGATRON_BERT,
    "modernbert": MODERNBERT,
}

"""The costs of a decoder-only transformer (`models/transformer.py`, `models/gpt.py`), counted from its shape."""

import dataclasses
import math
from collections.abc import Callable

from megajax.config import ModelConfig
from megajax.config.experts import expert_tokens
from megajax.config.latent import latent_parameters, latent_sizes
from megajax.config.layer_pattern import variant_numbers, variants
from megajax.config.lora import ROW, TARGETS, adapter_sizes, lora_targets
from megajax.config.mixers import RECURRENT, mixer_parameters
from megajax.config.mtp import mtp_block, mtp_parameters
from megajax.models.costs import Attention, Elementwise, Experts, KeptValue, Matmul, ModelCosts, Parameters
from megajax.models.remat import MODES
from megajax.ops.expert_choice import Choice

__all__ = ["transformer_costs"]

COLUMN = ("column", ("full",))  # of a matmul from the block's input


def transformer_costs(config: ModelConfig) -> ModelCosts:
    """The costs of a decoder-only transformer (`models/transformer.py`, `models/gpt.py`), counted from its shape."""
    costs = _model_costs(config)
    if not config.mtp_num_layers:
        return costs
    head = (Matmul("mtp_projection", 2 * config.hidden, config.hidden, "sequence"),)
    outside = {"shared": Parameters(whole=mtp_parameters(config, 0)), "head": head, "layers": config.mtp_num_layers}
    return dataclasses.replace(costs, further=dataclasses.replace(_model_costs(mtp_block(config)), **outside))


def _model_costs(config: ModelConfig) -> ModelCosts:
    """Without modules that predict further tokens."""
    if config.layer_kinds:
        kinds = {kind: _model_costs(config.of_kind(kind)) for kind in sorted(set(config.layer_kinds))}
        counted = tuple((config.layer_kinds.count(kind), costs) for kind, costs in kinds.items())
        first = max(kinds.values(), key=lambda one: (one.experts is not None, one.attention is not None))
        return dataclasses.replace(first, kinds=counted)
    hidden, size = config.hidden, config.head_dimension
    heads, groups = config.heads * size, config.key_value_heads * size
    query_key_value = heads * (2 if config.attention_gate else 1) + 2 * groups
    is_attention, has_mlp = config.mixer == "attention", config.feedforward_size > 0
    latent = latent_sizes(config) if is_attention and config.kv_latent else None
    joined = config.heads * config.value_dimension
    if latent:
        query_key_value = config.heads * (2 * latent.plain + latent.rotated + latent.value)
    if not is_attention:
        joined = heads = config.state_heads * config.state_head_size
        steps = config.state_heads * (1 if config.mixer == "mamba2" else 2)
        query_key_value = 2 * heads + 2 * config.recurrent_groups * config.recurrent_state + steps
    mixes = config.mixer != "none"
    if not mixes:
        joined = heads = query_key_value = 0
    norm, positions = config.norm_parameters, config.sequence_length * hidden * (config.positions == "learned")
    mlp, adapters = _mlp_costs(config), _adapter_parameters(config)
    over_heads = config.query_key_norm_over == "projection"  # then its scales are split as the heads are
    mixer_whole = hidden * int(config.has_output_biases) + (not over_heads) * config.query_key_norm_parameters
    if latent:
        mixer_whole = latent_parameters(config)[1]
    if not is_attention:
        mixer_whole = config.state_head_size if config.mixer == "gated_delta" else 0
    normed = 2 * (heads + groups) * (config.query_key_norm or config.rotated_norm) + 2 * heads * config.attention_sinks
    return ModelCosts(
        layers=config.layers,
        hidden=hidden,
        sequence_length=config.sequence_length,
        vocabulary=config.vocabulary,
        matmuls=(
            *(_mixer_matmuls(config, query_key_value, joined) if mixes else []),
            *_scan_matmuls(config),
            *mlp.matmuls,
            *_adapter_matmuls(config),
        ),
        attention=Attention(
            config.heads,
            config.key_value_heads,
            size,
            dropout=config.dropout,
            windows=_of_layers(config, "attention_window"),
            chunks=_of_layers(config, "attention_chunk"),
            causal=config.causal,
            # a softcap's derivative needs the scores
            scores_recomputed=(*["none"] * (config.attention_softcap is not None), "selective", "full"),
            unfused=config.unfused_attention,
            value_size=config.value_dimension,
            gathered=latent.down + (0 if latent.query else hidden) if latent else None,
        )
        if is_attention
        else None,
        block=Parameters(
            split=mixer_parameters(config) - mixer_whole + mlp.parameters.split + adapters.split,
            whole=mixer_whole + config.block_norms * norm + mlp.parameters.whole + adapters.whole,
        ),
        shared=Parameters(whole=positions + norm * (1 + config.embedding_norm)),
        vocabulary_width=hidden * (1 if config.tied_embeddings else 2),
        looked_up_width=0 if config.tied_embeddings else hidden,
        kept=_kept_by_transformer(config, query_key_value, joined, mlp),
        kept_for_weights=(
            KeptValue("gradients of query_key_value and mlp_in", query_key_value + mlp.dense_up, split="tensor"),
            KeptValue("gradients of experts_in", mlp.up - mlp.dense_up, split="tensor", routed=True),
            KeptValue("gradients of attention_output and mlp_out", (mixes + mlp.has_dense) * hidden),
            KeptValue("gradients of the experts' results", mlp.rows * hidden, split=None, routed=True),
            KeptValue("context", joined, split="tensor", modes=("full",)),
            *([KeptValue("gradients of the latents", latent.down)] if latent else []),
            *([KeptValue("residual", hidden, modes=("full",))] if mixes else []),
            # two intermediate values of the activation function are fp32
            KeptValue("activation", 2 * mlp.inner, split="tensor", modes=("full",), itemsize=4),
        ),
        elementwise=Elementwise(
            residual_passes=2 * config.block_norms
            + (mixes + has_mlp) * 3,  # norms (read, write), additions (read two, write)
            masks=2,
            # the activation function; queries, keys and values (read, write); the norm of queries and keys, and sinks
            inner=mlp.up
            + mlp.inner
            + 2 * query_key_value
            + (normed if is_attention else 4 * heads + 2 * query_key_value),
            whole=2 * 2 * mlp.rows * hidden,  # dispatch and combine (read, write)
        ),
        experts=mlp.experts,
        scratch=_scan_scratch(config),
    )


def _mixer_matmuls(config: ModelConfig, query_key_value: int, joined: int) -> list[Matmul]:
    """The projections into a mixer, of `query_key_value` elements, and out of it, of `joined` ones."""
    is_latent = config.mixer == "attention" and config.kv_latent
    into = [Matmul("query_key_value", config.hidden, query_key_value, *COLUMN)]
    out = Matmul("attention_output", joined, config.hidden, "row", ("full",))
    return [*(_latent_matmuls(config) if is_latent else into), out]


def _latent_matmuls(config: ModelConfig) -> list[Matmul]:
    """The projections of queries, keys and values; those from latents are computed again, unless they are kept."""
    one, again = latent_sizes(config), ("selective", "full")
    queries, keys_values = config.heads * (one.plain + one.rotated), config.heads * (one.plain + one.value)
    of_queries = [Matmul("query", config.hidden, queries, *COLUMN)]
    if one.query:
        of_queries = [
            Matmul("query_down", config.hidden, one.query, "sequence", ("full",)),
            Matmul("query_up", one.query, queries, "column", again),
        ]
    return [
        *of_queries,
        Matmul("key_value_down", config.hidden, one.key_value + one.rotated, "sequence", ("full",)),
        Matmul("key_value_up", one.key_value, keys_values, "column", again),
    ]


def _scan_matmuls(config: ModelConfig) -> tuple[Matmul, ...]:
    """The products of a recurrent mixer, as one of as many multiply-adds for a token; a backward does them again."""
    if config.mixer not in RECURRENT:
        return ()
    heads, groups, size, state = (
        config.state_heads,
        config.recurrent_groups,
        config.state_head_size,
        config.recurrent_state,
    )
    length = min(config.recurrent_chunk, config.sequence_length)
    count = groups * length * state + heads * (length * size + 2 * state * size)
    if config.mixer == "gated_delta":
        levels = math.ceil(math.log2(length)) if length > 1 else 0
        count += groups * length * state + heads * (2 * levels * length**2 + length * (size + state) + state * size)
    return (Matmul("state_scan", round(count / (heads * size)), heads * size, "column", tuple(MODES)),)


def _scan_scratch(config: ModelConfig) -> int:
    """Bytes for each token that a recurrent mixer's backward has: fp32 arrays of pairs in a chunk, values and states."""
    if config.mixer not in RECURRENT:
        return 0
    heads, size, state = config.state_heads, config.state_head_size, config.recurrent_state
    length = min(config.recurrent_chunk, config.sequence_length)
    arrays = 6 if config.mixer == "mamba2" else 10
    values = heads * size + 2 * config.recurrent_groups * state
    return 4 * (arrays * heads * length + 8 * values + 3 * heads * size * state // length)


def _norms_results(config: ModelConfig) -> bool:
    return config.norm_placement in ("post", "both")


def _of_layers(config: ModelConfig, name: str) -> tuple[int | None, ...]:
    """Of the layers, or of all together if they have the same."""
    each = [getattr(one, name) for one in variants(config)]
    return (each[0],) if len(set(each)) == 1 else tuple(each[n] for n in variant_numbers(config))


def _adapter_matmuls(config: ModelConfig) -> tuple[Matmul, ...]:
    """A and B of each adapter; what is communicated for them is not counted, nor that A of a row is split."""
    found = []
    for name in lora_targets(config):
        inputs, outputs = adapter_sizes(config, name)
        split = None if TARGETS[name].matmul in ROW else "column"
        found += [
            Matmul(f"{name}_a", inputs, config.lora, None, ("selective", "full")),
            Matmul(f"{name}_b", config.lora, outputs, split, ("full",), added=True),
        ]
    return tuple(found)


def _adapter_parameters(config: ModelConfig) -> Parameters:
    """Of a block's adapters: B of column-parallel matmuls is split over tensor, and A of row-parallel ones."""
    sizes = [(TARGETS[name].matmul in ROW, adapter_sizes(config, name)) for name in lora_targets(config)]
    split = config.lora * sum(sizes[0] if is_row else sizes[1] for is_row, sizes in sizes)
    return Parameters(split, config.lora * sum(sizes[1] if is_row else sizes[0] for is_row, sizes in sizes))


@dataclasses.dataclass(frozen=True)
class _MlpCosts:
    """The MLP of a block: the dense one, or router, experts and the shared one.

    Attributes:
      matmuls: with k rows of the experts for each token as k times the columns or rows of one expert.
      parameters: of all experts; without the router's `bias` and `losses`, which no gradient trains.
      up: elements of a token before the activation, in all MLPs that it passes.
      inner: after it.
      rows: experts that a token passes; 0 without experts.
      dense_up: of `up`, what is not the experts'.
      dense_inner: of `inner`.
      experts: None without them.
      has_dense: whether there is a dense or a shared MLP.
    """

    matmuls: tuple[Matmul, ...]
    parameters: Parameters
    up: int
    inner: int
    rows: int
    dense_up: int
    dense_inner: int
    experts: Experts | None
    has_dense: bool


def _mlp_costs(config: ModelConfig) -> _MlpCosts:
    hidden, bias, into = config.hidden, int(config.biases), 2 if config.is_gated else 1
    rows = config.experts_per_token if config.experts else 0
    dense = config.shared_feedforward if config.experts else config.feedforward_size
    routed = rows * config.feedforward_size
    matmuls, recomputed = [], ("full",) if _norms_results(config) else ()  # the norm of a result needs it
    split = whole = 0
    if dense:
        matmuls += [
            Matmul("mlp_in", hidden, into * dense, "column", ("full",)),
            Matmul("mlp_out", dense, hidden, "row", recomputed),
        ]
        split, whole = (hidden + bias) * into * dense + dense * hidden, bias * hidden
    if rows:
        matmuls += [
            Matmul("router", hidden, config.experts, None, ("full",)),
            Matmul("experts_in", hidden, into * routed, "column", ("full",)),
            Matmul("experts_out", routed, hidden, "row", recomputed),
        ]
        own, tokens = config.experts * (into + 1) * hidden * config.feedforward_size, config.sequence_length
        own += config.experts * int(config.expert_biases) * (into * config.feedforward_size + hidden)
        split += own
        whole += (hidden + int(config.expert_biases)) * config.experts + hidden * int(config.shared_gate)
    experts = None
    if rows:
        experts = Experts(Choice.of(config), own, expert_tokens(config, tokens) / tokens)
    return _MlpCosts(
        matmuls=tuple(matmuls),
        parameters=Parameters(split, whole),
        up=into * (dense + routed),
        inner=dense + routed,
        rows=rows,
        dense_up=into * dense,
        dense_inner=dense,
        experts=experts,
        has_dense=dense > 0,
    )


def _kept_by_transformer(
    config: ModelConfig, query_key_value: int, joined: int, mlp: _MlpCosts
) -> tuple[KeptValue, ...]:
    """The named values of `models/remat.py`, with the modes that keep them."""

    def value(name: str, per_token: int = 0, split: str | None = "sequence", **fields) -> KeptValue:
        modes = tuple(mode for mode, names in MODES.items() if name in names)
        return KeptValue(name, per_token, split=split, modes=modes, **fields)

    hidden, heads = config.hidden, config.heads
    is_attention, has_mlp, mixes = config.mixer == "attention", config.feedforward_size > 0, config.mixer != "none"
    placement, outputs = config.norm_placement, ("attention_output", "feedforward_output")
    values = [
        KeptValue("input", hidden),
        *(
            [] if config.post_norm or placement == "post" or not mixes else [value("attention_input", hidden)]
        ),  # else the block's input
        *([value(name, hidden) for name in outputs] if _norms_results(config) else []),
        *(
            []
            if is_attention or not mixes
            else [value("qkv", query_key_value, "tensor"), value("context", joined, "tensor")]
        ),
        *(
            [
                *_projected(config, value, query_key_value),
                value("probabilities", 0, "tensor", per_token_pair=heads, fused=False),
                value("context", joined, "tensor"),
                value("attention_statistics", heads, "tensor", itemsize=4, fused=True),
            ]
            if is_attention
            else []
        ),
        *([] if placement == "parallel" or not has_mlp or not mixes else [value("residual", hidden)]),
        *([value("feedforward_input", hidden)] if placement in ("pre", "both") and has_mlp else []),
        *(
            [value("up", mlp.dense_up, "tensor"), value("activation", mlp.dense_inner, "tensor")]
            if mlp.has_dense
            else []
        ),
        *([value("output_residual", hidden)] if config.post_norm else []),
    ]
    if config.experts:
        values += [
            value("router", config.experts, None, itemsize=4),
            value("up", mlp.up - mlp.dense_up, "tensor", routed=True),
            value("activation", mlp.inner - mlp.dense_inner, "tensor", routed=True),
            value("dispatched", mlp.rows * hidden, None, routed=True),
        ]
    if config.dropout > 0:
        pairs = {"per_token_pair": heads, "itemsize": 1, "fused": False}
        values += [
            *([value("probabilities_mask", 0, "tensor", **pairs)] if is_attention else []),
            value("attention_mask", hidden, itemsize=1),
            *([value("feedforward_mask", hidden, itemsize=1)] if has_mlp else []),
        ]
    return tuple(values)


def _projected(config: ModelConfig, value: Callable[..., KeptValue], width: int) -> list[KeptValue]:
    """Queries, keys and values, `width` elements, or what they are computed from."""
    if not config.kv_latent:
        return [value("qkv", width, "tensor")]
    one, queries = latent_sizes(config), config.heads * config.head_dimension
    found = [] if one.query else [value("qkv", queries, "tensor")]
    return [*found, value("latents", one.down), value("expanded", width - (0 if one.query else queries), "tensor")]

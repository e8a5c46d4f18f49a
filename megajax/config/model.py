"""The transformer: its shape, its legal values, and the layouts that can split it."""

import collections
import dataclasses
import functools
import math
from dataclasses import MISSING, dataclass
from typing import ClassVar

from megajax.config.errors import ConfigError, divisors, multiples, one_of
from megajax.config.experts import ONLY_WITH_EXPERTS, check_experts, expert_parameters
from megajax.config.fields import check_fields, setting
from megajax.config.hashing import HashSlot, hashed_once
from megajax.config.latent import check_latent
from megajax.config.layer_kinds import DENSE, check_layer_kinds, joined, model_kinds, parts_of
from megajax.config.layer_pattern import NO_PATTERN, check_layer_pattern, variant_numbers, variants, without_field
from megajax.config.lora import check_lora, lora_parameters
from megajax.config.mixers import MIXERS, check_mixer, mixer_parameters
from megajax.config.model_sizes import ModelSizes
from megajax.config.model_split import check_split
from megajax.config.mtp import check_mtp, mtp_block, mtp_parameters
from megajax.config.parallel import ParallelConfig
from megajax.config.rotary import check_rotary


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSizes, HashSlot):
    """The shape of a decoder-only transformer. The defaults are GPT's; those of other families are in `PRESETS`."""

    causal: ClassVar[bool] = True  # tokens attend to earlier tokens only
    post_norm: ClassVar[bool] = False  # norms are before attention, MLP and head
    first_attention_norm: ClassVar[bool] = True  # also in the first layer

    name: str = setting("custom", "name of the model, as printed and as stored in checkpoints")
    layers: int = setting(MISSING, "number of transformer blocks")
    hidden: int = setting(MISSING, "width of the residual stream")
    heads: int = setting(MISSING, "attention (query) heads")
    head_size: int | None = setting(None, "elements of a head", shown_default="hidden / heads")
    kv_heads: int | None = setting(
        None, "key and value heads; grouped-query attention if fewer than heads", shown_default="heads"
    )
    feedforward: int | None = setting(
        None, "inner width of the MLP, or of each expert; 0: blocks have no MLP", low=0, shown_default="4 * hidden"
    )
    vocabulary: int = setting(MISSING, "tokens of the vocabulary, before padding (see padded_vocabulary)")
    sequence_length: int = setting(MISSING, "tokens in a training sample")
    dropout: float = setting(
        0.0, "probability of dropping an element: embedding, attention and both block outputs", low=0, below=1
    )
    norm: str = setting(
        "layernorm",
        "normalisation of attention's, MLP's and head's input; unweighted_rmsnorm has no parameters (nanochat)",
        ("layernorm", "rmsnorm", "unweighted_rmsnorm"),
    )
    norm_placement: str = setting(
        "pre",
        "norms of the inputs of attention and MLP, of their results, of both, or one for the input of the two in parallel",
        ("pre", "post", "both", "parallel"),
    )
    norm_offset: bool = setting(False, "norms multiply by 1 + their weights (Gemma)")
    activation: str = setting(
        "gelu",
        "the MLP's nonlinearity: GELU by its tanh approximation or by erf; swiglu, geglu and geglu_exact have a gate; "
        "clamped_swiglu is gpt-oss's, squared_relu Nemotron's",
        ("gelu", "gelu_exact", "swiglu", "geglu", "geglu_exact", "clamped_swiglu", "squared_relu"),
    )
    activation_limit: float = setting(7.0, "clamped_swiglu: largest input of the gate, and of what it multiplies")
    layer_pattern: str = setting(
        NO_PATTERN,
        "kinds of layers, such as local*5,global, repeated over the layers; none: all are of one kind",
        metavar="KIND,...",
    )
    kind_fields: tuple[str, ...] = setting(
        (),
        "fields that a kind has of its own: local.sliding_window=1024,global.rotary_base=1e6",
        metavar="KIND.FIELD=VALUE,...",
    )
    mixer: str = setting(
        "attention",
        "what mixes the tokens of a block; none: it is an MLP alone, and layers with a mixer have no MLP",
        MIXERS,
    )
    recurrent_heads: int | None = setting(None, "heads of a recurrent mixer", shown_default="heads")
    recurrent_head_size: int | None = setting(None, "elements of such a head's values", shown_default="head_size")
    recurrent_groups: int = setting(1, "groups of such heads, which share queries and keys")
    recurrent_state: int = setting(
        128, "elements of such a query or key; a head's state has head_size * recurrent_state"
    )
    recurrent_convolution: int = setting(4, "tokens that the convolution before a recurrent mixer reads")
    recurrent_least_step: float = setting(
        0.0, "least step of a recurrent mixer, to which smaller ones are raised", low=0
    )
    recurrent_chunk: int = setting(64, "tokens of a chunk, within which a recurrent mixer has no loop")
    attention_gate: bool = setting(False, "attention's result is multiplied by a sigmoid of the token (Qwen3-Next)")
    positions: str = setting(
        "learned", "a learned table added to the embedding, rotary, or none", ("learned", "rotary", "none")
    )
    rotary_base: float = setting(10000.0, "base of the rotary frequencies")
    rotary_fraction: float = setting(1.0, "part of each head's elements that is rotated, at most 1")
    rotary_pairs: str = setting(
        "halves",
        "elements of a head that are rotated together: i and i + half, the same backwards (nanochat), or neighbours",
        ("halves", "halves_backwards", "neighbours"),
    )
    rotary_scaling: str = setting(
        "none", "rotary frequencies for a longer context", ("none", "linear", "llama3", "yarn", "longrope")
    )
    rotary_factor: float | None = setting(
        None, "how much longer rotary_scaling makes the context", shown_default="none"
    )
    rotary_original_length: int | None = setting(
        None, "context before rotary_scaling (llama3, yarn, longrope)", shown_default="sequence_length"
    )
    rotary_low_frequency: float = setting(
        1.0, "llama3: turns in the original context below which a frequency is divided"
    )
    rotary_high_frequency: float = setting(4.0, "llama3: turns in the original context above which a frequency is kept")
    rotary_beta_fast: float = setting(32.0, "yarn: turns in the original context above which a frequency is kept")
    rotary_beta_slow: float = setting(1.0, "yarn: turns in the original context below which a frequency is divided")
    rotary_truncate: bool = setting(True, "yarn: the pairs between which its ramp runs are whole numbers")
    rotary_factors: tuple[str, ...] = setting(
        (), "longrope: divisors of each pair's frequency, of samples within rotary_original_length, then of longer ones"
    )
    query_growth: float = setting(
        0.0, "b: queries at position p are multiplied by 1 + b ln(1 + floor((p + first) / length))", low=0
    )
    query_growth_first: int = setting(0, "of query_growth: what the first token's position counts as", low=0)
    query_growth_length: int | None = setting(
        None, "of query_growth: positions of a step", shown_default="rotary_original_length"
    )
    rotary_attention_factor: float | None = setting(
        None, "yarn, longrope: factor on rotated queries and keys", shown_default="of the paper"
    )
    experts: int = setting(0, "experts of each block's MLP (mixture of experts); 0: a dense MLP", low=0)
    experts_per_token: int = setting(2, "experts that each token is routed to, those with the highest scores (top-k)")
    dense_layers: int = setting(
        0, "of a model with experts, the first layers, which have a dense MLP instead (first_k_dense_replace)", low=0
    )
    moe_layer_freq: str = setting(
        "1",
        "layers that have experts: the first of every N, or a list of 0 (dense) and 1, such as ([0]*3+[1]*58)",
        metavar="N|LIST",
    )
    dense_feedforward: int | None = setting(
        None, "inner width of the MLP of the layers without experts", shown_default="feedforward"
    )
    shared_feedforward: int = setting(
        0, "inner width of the shared expert, an MLP for every token in addition to its experts; 0: none", low=0
    )
    shared_gate: bool = setting(False, "the shared expert's result is multiplied by a sigmoid of the token (Qwen2)")
    expert_biases: bool = setting(False, "router and experts add biases (gpt-oss)")
    router_scores: str = setting(
        "softmax",
        "scores of the experts from the router's logits: over all experts, or each by itself",
        ("softmax", "sigmoid"),
    )
    router_groups: int = setting(
        1, "groups of experts, of which a token's are in router_group_choices only (DeepSeek-V3)"
    )
    router_group_choices: int = setting(1, "groups that a token's experts are in, those with the best experts")
    router_group_best: int = setting(2, "experts of a group whose scores' sum ranks it (1: DeepSeek-V2)")
    router_scale: float = setting(1.0, "factor on the weights of a token's experts")
    router_softmax: str = setting(
        "before",
        "softmax over the scores of all experts before the choice, or of the chosen ones after it",
        ("before", "after"),
    )
    router_normalize: bool = setting(True, "the weights of a token's experts are divided by their sum")
    expert_weighted: str = setting(
        "result",
        "what a token's weight of an expert multiplies: its result, or its input (Llama 4)",
        ("result", "input"),
    )
    balance_loss: float = setting(0.0, "coefficient of the loss that balances the experts within a sample", low=0)
    router_z_loss: float = setting(0.0, "coefficient of the mean squared logarithm of the router's softmax sum", low=0)
    balance_bias_rate: float = setting(
        0.0, "change per step of the biases that balance the experts without a loss (2408.15664)", low=0
    )
    expert_capacity: float = setting(
        0.0,
        "in training each expert takes at most this many times its even share of a sample's choices, and drops the rest; "
        "0: none is dropped",
        low=0,
    )
    query_key_norm: bool = setting(
        False, "RMS norm of queries and keys before they are rotated; query_key_norm_over says over which elements"
    )
    query_key_norm_over: str = setting(
        "head",
        "the elements that the norm of queries and keys is over: those of each head, or of all heads of a token",
        ("head", "projection"),
    )
    rotated_norm: bool = setting(
        False, "RMS norm without weights of each head's queries and keys, on layers that rotate them (Llama 4)"
    )
    sliding_window: int | None = setting(
        None,
        "latest tokens that a token attends to, itself included; of BERT as many later ones too",
        shown_default="all",
    )
    chunked_attention: int | None = setting(
        None, "tokens of a chunk: none attends to tokens of another one (Llama 4)", shown_default="none"
    )
    kv_latent: int = setting(
        0, "elements of the latent that keys and values are computed from (latent attention); 0: there is none", low=0
    )
    query_latent: int = setting(0, "with kv_latent: likewise for queries; 0: they are computed from the input", low=0)
    rotary_head_size: int | None = setting(
        None, "with kv_latent: the last elements of a query that are rotated, and of a key, which heads share"
    )
    value_head_size: int | None = setting(
        None, "with kv_latent: elements of a head's values", shown_default="head_size"
    )
    attention_scale: float | None = setting(None, "factor on queries times keys", shown_default="1 / sqrt(head_size)")
    attention_softcap: float | None = setting(
        None, "bound c of attention scores x, which become c tanh(x / c)", shown_default="none"
    )
    attention_sinks: bool = setting(False, "each head's softmax has one more, learned score, of no value (gpt-oss)")
    embedding_multiplier: float = setting(1.0, "factor on the embedding")
    embedding_norm: bool = setting(False, "the embedding is normed before the first block")
    residual_multiplier: float = setting(1.0, "factor on what attention and MLP add to the residual")
    logit_multiplier: float = setting(1.0, "factor on the logits")
    logit_softcap: float | None = setting(None, "bound c of logits x, which become c tanh(x / c)", shown_default="none")
    mtp_num_layers: int = setting(
        0, "modules that predict one token further each, in training (multi-token prediction, DeepSeek-V3)", low=0
    )
    mtp_loss_scaling_factor: float = setting(0.1, "weight of the mean of these modules' losses", low=0)
    tied_embeddings: bool = setting(True, "the output head uses the token embedding's weights")
    biases: bool = setting(True, "linear layers and layer norms add a bias (an rmsnorm never does)")
    qkv_biases: bool | None = setting(None, "queries, keys and values add a bias", shown_default="as biases")
    output_biases: bool | None = setting(None, "attention's output projection adds a bias", shown_default="as biases")
    lora: int = setting(
        0,
        "rank of adapters (LoRA), which are trained in place of the model's own weights; 0: none",
        low=0,
        metavar="RANK",
    )
    lora_alpha: float | None = setting(None, "adapters are scaled by lora_alpha / lora", shown_default="lora")
    lora_targets: tuple[str, ...] = setting(
        (),
        "projections with adapters, by their names in transformers or Megatron: q_proj,v_proj,linear_fc2; or all-linear",
        metavar="NAME,...",
        shown_default="q_proj,v_proj; linear_qkv of a GPT",
    )
    lora_dropout: float = setting(0.0, "probability of dropping an element of what adapters read", low=0, below=1)
    init_deviation: float = setting(0.02, "standard deviation of the initial weights")
    norm_epsilon: float = setting(1e-5, "added to the variance inside a norm")

    @property
    def layer_kinds(self) -> tuple[str, ...] | None:
        """The kind of each layer, of layers whose parameters differ; None: those of all are alike.

        "dense" or "sparse", the mixer, or both.
        """
        return _layer_kinds(self)

    def of_kind(self, kind: str | None) -> "ModelConfig":
        """The configuration of a model all of whose layers are as those of one kind; `layers` stays. None: itself."""
        if kind is None:
            return self
        mixer, mlp = parts_of(kind, MIXERS)
        changes = {"dense_layers": 0, "moe_layer_freq": "1", "dense_feedforward": None}
        if mixer:
            changes |= {"mixer": mixer} | without_field(self, "mixer")
        alone = mixer not in ("", "none") and "none" in self.mixers
        if mlp == DENSE or alone:
            width = self.feedforward if self.dense_feedforward is None else self.dense_feedforward
            changes |= {"experts": 0, "feedforward": 0 if alone else width}
            changes |= {name: type(getattr(self, name))(0) for name in ONLY_WITH_EXPERTS}
        return dataclasses.replace(self, **changes)

    @property
    def parameters(self) -> int:
        """Exact number of parameters, adapters too, with the vocabulary unpadded.

        For a GPT this is 2104.04473 equation 2 plus the final layer norm's 2 * hidden, which that equation leaves out.
        """
        position_table = self.sequence_length * self.hidden if self.positions == "learned" else 0
        token_tables = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        blocks = sum(count * one._block_parameters for one, count in self._kinds)
        further = mtp_parameters(self, mtp_block(self)._block_parameters) if self.mtp_num_layers else 0
        outside = position_table + token_tables + (1 + self.embedding_norm) * self.norm_parameters
        return blocks + outside + lora_parameters(self) + further

    @property
    def _kinds(self) -> list[tuple["ModelConfig", int]]:
        """The model of each kind of layers, and how many layers are of it."""
        counts = collections.Counter(self.layer_kinds or (None,) * self.layers)
        return [(self.of_kind(kind), count) for kind, count in counts.items()]

    @property
    def norm_parameters(self) -> int:
        """Of one norm of the residual stream."""
        return self.hidden * {"layernorm": 1 + self.biases, "rmsnorm": 1}.get(self.norm, 0)

    @property
    def _block_parameters(self) -> int:
        """Of a layer, of a model whose layers are of one kind; without adapters."""
        bias, width = int(self.biases), self.feedforward_size
        into_mlp = (2 if self.is_gated else 1) * (self.hidden + bias) * width
        mlp = into_mlp + (width + bias) * self.hidden if width else 0
        mlp = expert_parameters(self) if self.experts else mlp
        return mixer_parameters(self) + self.block_norms * self.norm_parameters + mlp

    @property
    def active_parameters(self) -> int:
        """The `parameters` that one token uses: without the experts that it is not routed to."""
        if not self.experts:
            return self.parameters
        unused = expert_parameters(self) - expert_parameters(self, self.experts_per_token)
        further = self.mtp_num_layers if self.mtp_num_layers and mtp_block(self).experts else 0
        return self.parameters - unused * (further + sum(count for one, count in self._kinds if one.experts))

    def validate(self) -> None:
        """Checks the model's own shape.

        Raises:
            ConfigError: for the first field that is illegal, alone or with the others.
        """
        check_fields(self)
        if self.head_size is None and self.hidden % self.heads:
            raise ConfigError(
                f"hidden = {self.hidden} is not a multiple of heads = {self.heads}: "
                f"pass {one_of('heads', divisors(self.hidden), self.heads)}, "
                f"or {one_of('hidden', multiples(self.heads, self.hidden), self.hidden)}, or --head-size COUNT."
            )
        if self.heads % self.key_value_heads:
            raise ConfigError(
                f"kv_heads = {self.key_value_heads} does not divide heads = {self.heads}: "
                f"pass {one_of('kv_heads', divisors(self.heads), self.key_value_heads)}."
            )
        check_latent(self)
        check_mixer(self)
        check_rotary(self)
        check_experts(self)
        check_layer_kinds(self)
        check_layer_pattern(self)
        check_lora(self)
        check_mtp(self)

    def check_parallel(self, parallel: ParallelConfig) -> None:
        """Checks that this model's arrays can be split as `parallel` requires; both are already validated.

        Raises:
            ConfigError: for the first size that cannot be split.
        """
        check_split(self, parallel)


def padded_vocabulary(vocabulary: int, shares: int) -> int:
    """The next multiple of lcm(128, shares): rows split evenly, and the logits' matmul has whole tiles."""
    multiple = math.lcm(128, shares)
    return -(-vocabulary // multiple) * multiple


@functools.lru_cache(maxsize=256)  # the planner asks hundreds of thousands of times
def _layer_kinds(model: ModelConfig) -> tuple[str, ...] | None:
    mixers, each = None, variants(model)
    if len(model.mixers) > 1:
        mixers = tuple(each[n].mixer for n in variant_numbers(model))
    kinds = model_kinds(model) if model.experts else ()
    return joined(mixers, kinds if len(set(kinds)) > 1 else None)

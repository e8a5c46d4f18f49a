"""Sizes and properties that follow from a `ModelConfig`'s fields, or from those of each kind of its layers."""

from megajax.config.layer_pattern import variants

__all__ = ["ModelSizes"]


class ModelSizes:
    """The base of `ModelConfig` with what its fields amount to; None of a field is its default here."""

    @property
    def head_dimension(self) -> int:
        """Elements of one head."""
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def value_dimension(self) -> int:
        """Elements of one head of the values."""
        return self.value_head_size or self.head_dimension

    @property
    def rotated_dimension(self) -> int:
        """Elements of a head that rotary positions rotate, the first ones; rounded down, as in transformers."""
        return self.rotary_head_size or int(self.head_dimension * self.rotary_fraction)

    @property
    def state_heads(self) -> int:
        """Heads of a recurrent mixer."""
        return self.heads if self.recurrent_heads is None else self.recurrent_heads

    @property
    def state_head_size(self) -> int:
        """Elements of such a head's values."""
        return self.head_dimension if self.recurrent_head_size is None else self.recurrent_head_size

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixers of the layers' kinds, each once."""
        return tuple(dict.fromkeys(one.mixer for one in variants(self)))

    @property
    def has_qkv_biases(self) -> bool:
        """Whether queries, keys and values add a bias."""
        return self.biases if self.qkv_biases is None else self.qkv_biases

    @property
    def has_output_biases(self) -> bool:
        """Whether attention's output projection adds a bias."""
        return self.biases if self.output_biases is None else self.output_biases

    @property
    def unfused_attention(self) -> str:
        """A field that attention by fused kernels, or round a ring, does not have; "": none."""
        both_ways = not self.causal and any(self.attention_windows)
        return "attention_softcap" if self.attention_softcap else "sliding_window" if both_ways else ""

    @property
    def block_norms(self) -> int:
        """Norms of the residual stream in a block."""
        parts = (self.mixer != "none") + (self.feedforward_size > 0)
        return {"both": 4, "parallel": 1}.get(self.norm_placement, parts)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gating matrix."""
        return self.activation in ("swiglu", "geglu", "geglu_exact", "clamped_swiglu")

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The sliding windows of the layers' kinds, each once."""
        return tuple(dict.fromkeys(one.attention_window for one in variants(self)))

    @property
    def attention_window(self) -> int | None:
        """The sliding window, where all layers are of one kind; None if it hides nothing of a sample."""
        hides = self.sliding_window is not None and self.sliding_window < self.sequence_length
        return self.sliding_window if hides else None

    @property
    def attention_chunks(self) -> tuple[int | None, ...]:
        """The chunks of the layers' kinds, each once."""
        return tuple(dict.fromkeys(one.attention_chunk for one in variants(self)))

    @property
    def attention_chunk(self) -> int | None:
        """Tokens of a chunk, where all layers are of one kind; None if it hides nothing of a sample."""
        hides = self.chunked_attention is not None and self.chunked_attention < self.sequence_length
        return self.chunked_attention if hides else None

    @property
    def growth_length(self) -> int:
        """Positions of a step of `query_growth`."""
        return self.query_growth_length or self.rotary_original_length or self.sequence_length

    @property
    def key_value_heads(self) -> int:
        """Heads of the keys and of the values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def feedforward_size(self) -> int:
        """Inner width of the MLP."""
        return 4 * self.hidden if self.feedforward is None else self.feedforward

    @property
    def query_key_norm_parameters(self) -> int:
        """Scales of a block's norms of queries and keys."""
        if not self.query_key_norm:
            return 0
        heads = 2 if self.query_key_norm_over == "head" else self.heads + self.key_value_heads
        return heads * self.head_dimension

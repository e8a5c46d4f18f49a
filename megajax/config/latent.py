"""Latent attention (2405.04434 section 2.1): the rules between its fields, its sizes, and its numbers of parameters."""

from typing import Any, NamedTuple

from megajax.config.errors import ConfigError, option

__all__ = ["LatentSizes", "check_latent", "latent_parameters", "latent_sizes"]

SIZES = {"query_latent": 0, "rotary_head_size": None, "value_head_size": None}
# Fields that queries, keys and values from latents do not have, with their legal values.
FIXED = {
    "attention_sinks": False,
    "attention_gate": False,
    "query_key_norm": False,
    "query_growth": 0.0,
    "rotated_norm": False,
    "lora": 0,
    "rotary_fraction": 1.0,
}


class LatentSizes(NamedTuple):
    """Elements of a token.

    Attributes:
      query, key_value: of the two latents; a query of 0: queries are computed from the block's input.
      plain, rotated: of a head's queries and keys, the part that is not rotated and the one that is, which keys share.
      value: of a head's values.
    """

    query: int
    key_value: int
    plain: int
    rotated: int
    value: int

    @property
    def down(self) -> int:
        """Of what all ranks of a tensor group need: the latents and the rotated key."""
        return self.query + self.key_value + self.rotated


def latent_sizes(model: Any) -> LatentSizes:
    """Of a `ModelConfig` with latent attention."""
    rotated = model.rotary_head_size
    plain = model.head_dimension - rotated
    return LatentSizes(model.query_latent, model.kv_latent, plain, rotated, model.value_dimension)


def latent_parameters(model: Any) -> tuple[int, int]:
    """Parameters of latent attention that are split over tensor, and that are not: down projections and their norms."""
    one, heads = latent_sizes(model), model.heads
    split = (one.query or model.hidden) * heads * (one.plain + one.rotated)
    split += one.key_value * heads * (one.plain + one.value) + heads * one.value * model.hidden
    whole = model.hidden * one.down + one.query + one.key_value + model.hidden * int(model.has_output_biases)
    return split, whole


def check_latent(model: Any) -> None:
    """Checks the fields of latent attention of a `ModelConfig` whose fields are legal each by itself.

    Raises:
      ConfigError: for the first rule that is broken.
    """
    if not model.kv_latent:
        for name, usual in SIZES.items():
            if (value := getattr(model, name)) != usual:
                raise ConfigError(
                    f"{name} = {value} is of latent attention, and kv_latent = 0: pass --kv-latent SIZE, or omit "
                    f"{option(name)}."
                )
        return
    given = f"kv_latent = {model.kv_latent}"
    if not model.causal:
        raise ConfigError(f"{given} is not supported by BERT: pass --kv-latent 0.")
    if model.rotary_head_size is None or not 0 < model.rotary_head_size < model.head_dimension:
        raise ConfigError(
            f"{given} needs rotary_head_size, of the part of a head's {model.head_dimension} elements that keys share, and "
            f"it is {model.rotary_head_size}: pass --rotary-head-size {max(2, model.head_dimension // 6 * 2)}."
        )
    if model.rotary_head_size % 2 and model.positions == "rotary":
        raise ConfigError(
            f"positions = rotary rotates pairs of elements, and rotary_head_size = {model.rotary_head_size} is odd: pass "
            f"--rotary-head-size {model.rotary_head_size + 1}."
        )
    if model.key_value_heads != model.heads:
        raise ConfigError(
            f"{given} computes keys and values of all heads, and kv_heads = {model.kv_heads}: omit --kv-heads."
        )
    if model.has_qkv_biases:
        raise ConfigError(f"{given} has no biases of queries, keys and values: pass --no-qkv-biases.")
    for name, legal in FIXED.items():
        if (value := getattr(model, name)) != legal:
            off = f"--no-{option(name)[2:]}" if legal is False else f"{option(name)} {legal:g}"
            raise ConfigError(f"{given} does not work with {name} = {value}: pass {off}.")

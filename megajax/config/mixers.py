"""The rules between a model's fields of recurrent mixers, and their parameters; `models/mixers/recurrent.py` computes them.

A head has a state of `recurrent_head_size` x `recurrent_state` elements in place of keys and values. `recurrent_groups`
groups of heads share what is written to the state and what it is read with, as `kv_heads` share keys and values.
"""

from typing import Any

from megajax.config.errors import ConfigError, divisors, one_of, option
from megajax.config.latent import latent_parameters

__all__ = ["MIXERS", "RECURRENT", "check_mixer", "check_mixer_parallel", "mixer_parameters"]

MIXERS = ("attention", "mamba2", "gated_delta", "none")
RECURRENT = MIXERS[1:3]


def mixer_parameters(model: Any) -> int:
    """Parameters of the mixer of a block, of a model whose layers are of one kind."""
    if model.mixer == "none":
        return 0
    size, hidden = model.head_dimension, model.hidden
    if model.mixer == "attention" and model.kv_latent:
        return sum(latent_parameters(model))
    if model.mixer == "attention":
        query_key_value = (model.heads * (2 if model.attention_gate else 1) + 2 * model.key_value_heads) * size
        count = (hidden + int(model.has_qkv_biases)) * query_key_value
        count += (model.heads * size + int(model.has_output_biases)) * hidden + model.query_key_norm_parameters
        return count + model.heads * int(model.attention_sinks)
    heads, inner = model.state_heads, model.state_heads * model.state_head_size
    convolved = 2 * model.recurrent_groups * model.recurrent_state + inner
    if model.mixer == "mamba2":
        into, rest = convolved + inner + heads, convolved + 3 * heads + inner  # biases, steps, skips, the norm's scales
    else:
        into, rest = convolved + inner + 2 * heads, 2 * heads + model.state_head_size
    return hidden * (into + inner) + convolved * model.recurrent_convolution + rest


def check_mixer(model: Any) -> None:
    """Checks the fields of a `ModelConfig` that mixers read; those of kinds of layers, with the model of each kind.

    Raises:
        ConfigError: for the first rule that is broken.
    """
    has_both = model.mixer != "none" and model.feedforward_size
    if not has_both:
        wrong = {"experts": model.experts, "norm_placement": model.norm_placement}
        legal = {"experts": model.experts if model.feedforward_size else 0, "norm_placement": "pre"}
        for name, value in wrong.items():
            if value != legal[name]:
                if model.feedforward_size:
                    raise ConfigError(
                        f"mixer = none leaves a block its MLP alone, and {name} = {value} is of two parts: pass "
                        f"{option(name)} {legal[name]}."
                    )
                raise ConfigError(
                    f"feedforward = 0 leaves a block without its MLP, and {name} = {value} needs one: pass --feedforward "
                    "SIZE."
                )
    if model.mixer == "none" and not model.feedforward_size:
        raise ConfigError("mixer = none and feedforward = 0 leave a block nothing: pass --feedforward SIZE.")
    if model.lora and (model.attention_gate or model.mixer != "attention"):
        name = "attention_gate" if model.attention_gate else "mixer"
        raise ConfigError(
            f"lora = {model.lora} is of projections of queries, keys and values that {name} = {getattr(model, name)} does "
            "not have: pass --lora 0."
        )
    if model.mixer not in RECURRENT:
        return
    given = f"mixer = {model.mixer}"
    if not model.causal:
        raise ConfigError(f"{given} reads tokens in one direction, and BERT attends to both: pass --mixer attention.")
    heads, groups = model.state_heads, model.recurrent_groups
    if heads % groups:
        raise ConfigError(
            f"recurrent_groups = {groups} does not divide the {heads} heads: pass "
            f"{one_of('recurrent_groups', divisors(heads), groups)}."
        )


def check_mixer_parallel(model: Any, parallel: Any) -> dict[str, int]:
    """Checks a layout of a model with recurrent mixers, or gates on attention.

    Returns:
        What tensor splits, by name.

    Raises:
        ConfigError: the layout cannot run them.
    """
    if model.attention_gate and model.key_value_heads % parallel.tensor:
        raise ConfigError(
            f"attention_gate = True does not work with copies of a key and value head, which tensor = {parallel.tensor} "
            f"makes of kv_heads = {model.key_value_heads}: pass "
            f"{one_of('tensor', divisors(model.key_value_heads), parallel.tensor)}."
        )
    found = [mixer for mixer in model.mixers if mixer in RECURRENT]
    if not found:
        return {}
    for name, usual in (("context", 1), ("tensor_overlap", "none")):
        if (value := getattr(parallel, name)) != usual:
            raise ConfigError(
                f"{name} = {value} cuts sequences, and mixer = {found[0]} passes its state from token to token: pass "
                f"{option(name)} {usual}."
            )
    return {"recurrent_groups": model.recurrent_groups}

"""config.json of Hugging Face to `ModelConfig` or `BertConfig`, and back.

Writing is checked by reading back: a model whose fields do not all return is not of the family.
"""

import contextlib
import dataclasses
import io
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from megajax.config import BertConfig, ConfigError, ModelConfig, option
from megajax.config.compare import stored_differences
from megajax.config.layer_kinds import DENSE, MOST_LAYERS, model_kinds, pattern_of
from megajax.config.layer_pattern import KIND_FIELDS, layer_pattern_of, variant_numbers, variants, words_of
from megajax.data.hugging_face import library
from megajax.data.tokenizer_files import has_tokenizer
from megajax.interop.hugging_face.expert_families import NAMES_OF_EXPERTS
from megajax.interop.hugging_face.families import FAMILIES
from megajax.interop.hugging_face.keys import Family, Keys, read_json
from megajax.interop.hugging_face.llama_families import SCALINGS
from megajax.interop.hugging_face.quantized import check_quantization, open_weights
from megajax.interop.hugging_face.tables import TABLES
from megajax.interop.hugging_face.ties import differing_tie
from megajax.interop.safetensors import SINGLE, has_tensors
from megajax.schedules.errors import shown
from megajax.schedules.paths import hub_advice

__all__ = ["check_written", "family_of_model", "merge_config", "read_config", "read_json", "tokenizer_options"]

# Families of models with code of their own -> the one in transformers that computes them.
ALIASES = {"kimi_k2": "deepseek_v3"}
# Keys of an imported config.json that an export does not keep: what they say is in other keys, or no longer true.
REPLACED = ("quantization_config", "rope_scaling", "rope_theta", "partial_rotary_factor")
REPLACED += ("original_max_position_embeddings",)
# Families that transformers scales where config.json has no scaling, of those that may have none.
SCALED_BY_DEFAULT = ("gpt_oss",)
STATES = ("recurrent_heads", "recurrent_head_size", "recurrent_groups", "recurrent_state")  # of recurrent mixers
STATES += ("recurrent_convolution", "recurrent_chunk", "recurrent_least_step")
# Fields of a ModelConfig that config.json does not have, or that change no logits.
FREE = ("name", "dropout", "init_deviation", "balance_loss", "router_z_loss", "choices", "mtp_loss_scaling_factor")


def read_config(directory: pathlib.Path) -> tuple[Family, ModelConfig]:
    """The family and the model of a directory's config.json; its sequence length is the longest that config.json allows.

    Raises:
      ConfigError: it cannot be read, is of an unknown family, or has an unsupported value.
    """
    if directory.suffix.lower() == ".gguf":
        raise ConfigError(
            f"{directory} is a GGUF file, and a directory is needed: import it first, with python -m "
            f"megajax.interop.hugging_face import {directory} --run-dir RUN, and use that run directory."
        )
    if advice := hub_advice(str(directory)):
        raise ConfigError(f"there is no directory {directory}: give one of a Hugging Face model.{advice}")
    path = directory / "config.json"
    if not path.exists() and (directory / "latest_checkpointed_iteration.txt").exists():
        raise ConfigError(
            f"{directory} is a checkpoint of Megatron-LM: import it first, with python -m megajax.interop.megatron import "
            f"{directory} --run-dir RUN, and use that run directory."
        )
    keys = Keys(read_json(path), path)
    kind = keys.get("model_type", str, "")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{path}: model_type = {shown(kind)} is not supported: give a model of {known}")
    check_quantization(keys)
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"{directory} has an adapter of PEFT: merge it (merge_and_unload, save_pretrained), or remove it"
        )
    family, model = _model_of(keys, directory.absolute().name)
    return family, _as_stored(directory, family, model)


def _model_of(keys: Keys, name: str) -> tuple[Family, ModelConfig]:
    """The family and the model of the keys of a config.json, which is at their path."""
    path, kind = pathlib.Path(keys.path), keys.get("model_type", str)
    for count in ("num_hidden_layers", "n_layer", "num_labels"):  # lists of so many would be made first
        if type(keys.values.get(count)) is int and keys.values[count] > MOST_LAYERS:
            keys.refuse(count)
    keys = _normalized(keys)
    model = FAMILIES[kind].config(name=name, **FAMILIES[kind].read(keys))
    try:
        model.validate()
    except ConfigError as error:
        raise ConfigError(f"{path} is not a legal model: {error}") from None
    return FAMILIES[kind], model


def _as_stored(directory: pathlib.Path, family: Family, model: ModelConfig) -> ModelConfig:
    """The model; without tied embeddings if the files have two tables of different values, as in transformers."""
    if not model.tied_embeddings or not has_tensors(directory):
        return model
    second = differing_tie(open_weights(directory), family.name)
    if second is None or getattr(model, "output_heads", "masked_lm").partition("_")[0] != "masked":  # has no such head
        return model
    if isinstance(model, BertConfig):
        raise ConfigError(
            f"{directory}: {second} is not tied to the embedding, but has other values: megajax's BERT has no such head"
        )
    return dataclasses.replace(model, tied_embeddings=False)


def _normalized(keys: Keys) -> Keys:
    """The keys as transformers has them: its defaults, and one form for what its versions write in several.

    Raises:
      ConfigError: transformers refuses a value.
    """
    path = pathlib.Path(keys.path)
    transformers = library("config.json of Hugging Face")
    try:
        if same := ALIASES.get(keys.values.get("model_type")):
            found = transformers.AutoConfig.for_model(**keys.values | {"model_type": same})
        else:
            found = transformers.AutoConfig.from_pretrained(
                str(path.parent), trust_remote_code=False, local_files_only=True
            )
        if getattr(found, "rope_parameters", None):
            found.standardize_rope_params()  # again, as its models do: now with original_max_position_embeddings
    except Exception as error:  # of many types: of a wrong type, of an unknown value, divisions by zero
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path}: transformers refuses it ({reason or type(error).__name__}); correct the file"
        ) from None
    keys.require("per_layer_config")
    keys.require("transformers_weights", SINGLE)  # another file
    values = found.to_dict()
    return Keys(values | {name: values.get(theirs) for name, theirs in found.attribute_map.items()}, path)


def tokenizer_options(directory: pathlib.Path) -> dict[str, str]:
    """The option `tokenizer` of a directory: itself; empty if it has no tokenizer."""
    return {"tokenizer": str(directory)} if has_tokenizer(directory) else {}


def family_of_model(model: ModelConfig, preferred: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The family that computes a model, and the keys of its config.json.

    Args:
      preferred: model_type of the family to take if several compute the model.

    Raises:
      ConfigError: there is none; the message names the fields that the nearest one does not have.
    """
    nearest: tuple[str, list[str]] | None = None
    of_experts = (model.experts > 0, None)
    families = [one for one in FAMILIES.values() if one.config is type(model) and one.has_experts in of_experts]
    families = [family for family in families if model.kv_latent or not family.has_latents]
    # Others have tensors of an MLP in each layer.
    families = [family for family in families if model.feedforward_size or family.mixers_alone]
    for family in sorted(families, key=lambda family: family.name != preferred):
        keys = {"architectures": [family.architecture], "model_type": family.name} | family.write(model)
        try:
            back = family.config(name=model.name, **family.read(Keys(keys, "config.json")))
        except ConfigError:  # it has no such value
            continue
        differing = _differences(family, model, back)
        if not differing:
            return family, keys
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = family.name, differing
    name, differing = nearest or ("none", ["causal was False"])  # of BERT's all have an MLP
    field = differing[0].partition(" was ")
    value = field[2].partition(", is ")[0]
    if not model.feedforward_size:
        alone = " and ".join(family.name for family in FAMILIES.values() if family.mixers_alone)
        raise ConfigError(
            f"feedforward = 0 leaves layers without an MLP, which {alone} have, but not with {field[0]} = {value}: only "
            "models of a family can be exported; see --feedforward."
        )
    raise ConfigError(
        f"{field[0]} = {value} has no place in a config.json of {', '.join(FAMILIES)} (the nearest is {name}): only models "
        f"of these families can be exported; see {option(field[0])}."
    )


def merge_config(original: Mapping[str, Any], keys: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json of an export: the keys of a model in those of the config.json that it was imported with.

    Args:
      original: the imported file's; empty: there is none.
      keys: as `family_of_model` returns them.
      dtype: of the exported weights, "float32" or "bfloat16".
    """
    if original.get("model_type") != keys["model_type"]:
        original = {}
    original = {key: value for key, value in original.items() if key not in REPLACED}
    keys, has_table = keys | {"dtype" if "dtype" in original else "torch_dtype": dtype}, "rope_parameters" not in keys
    if "pad_token_id" in original:  # legal, since transformers has read it
        keys.pop("pad_token_id", None)
    rope = keys.get("rope_parameters", {})
    if "rope_theta" in rope and not original.pop("rope_parameters", None):  # as transformers 4 writes it
        scaling = dict(keys.pop("rope_parameters"))
        keys |= {name: scaling.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in scaling}
        plain = scaling["rope_type"] == "default" and keys["model_type"] not in SCALED_BY_DEFAULT
        keys["rope_scaling"] = None if plain else scaling
    usual, other = NAMES_OF_EXPERTS
    if usual in keys and usual not in original and other in original:
        keys[other] = keys.pop(usual)
    longest = original.get("max_position_embeddings")
    if isinstance(longest, int) and not has_table:  # shorter samples change no weight
        keys["max_position_embeddings"] = max(longest, keys["max_position_embeddings"])
    return {**original, **keys}


def check_written(keys: Mapping[str, Any], family: Family, model: ModelConfig) -> None:
    """Checks that transformers reads a config.json of these keys as the model: where a key is missing it has its default.

    Nothing is checked without transformers, which an export does not need.

    Raises:
      ConfigError: it reads another model, or refuses it.
    """
    try:
        library("config.json of Hugging Face")
    except ConfigError:
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):  # notes are for imports
        path = pathlib.Path(folder, "config.json")
        path.write_text(json.dumps(keys), encoding="utf-8")
        try:
            back = _model_of(Keys(dict(keys), path), model.name)[1]
            differing = _differences(family, model, back)
        except ConfigError as error:
            differing = [str(error).replace(str(path), "config.json")]
    if not differing:
        return
    if differing[0].startswith("kind_fields "):  # all of each kind of layers
        differing[0] = ", ".join(sorted({*_explicit(back).kind_fields} - {*_explicit(model).kind_fields}))
    raise ConfigError(
        f"this {family.name} model cannot be exported: transformers would read its config.json as another one "
        f"({'; '.join(differing)})."
    )


def _differences(family: Family, model: ModelConfig, back: ModelConfig) -> list[str]:
    """What differs between a model and what a config.json of the family makes of it, of the fields that it has."""
    has_biases = TABLES[family.name].leaves.get("blocks/feedforward/router/bias")  # which the rate moves
    longer = back.sequence_length > model.sequence_length and model.positions != "learned"  # trained on a part of it
    free = (*FREE, *family.free, *["balance_bias_rate"] * bool(has_biases), *["sequence_length"] * longer)
    free += ("mtp_num_layers",) * TABLES[family.name].more_layers
    return stored_differences(dataclasses.asdict(_explicit(model)), _explicit(back), leave_out=free)


def _states(model: ModelConfig) -> dict[str, int]:
    return {"recurrent_heads": model.state_heads, "recurrent_head_size": model.state_head_size}


def _growth(model: ModelConfig, grows: bool) -> dict[str, int | None]:
    """The fields of `query_growth`, explicit, or without an effect."""
    usual = {"query_growth_first": 0, "query_growth_length": None}
    return (
        {"query_growth_first": model.query_growth_first, "query_growth_length": model.growth_length} if grows else usual
    )


def _explicit(model: ModelConfig) -> ModelConfig:
    """The model with computed values in place of None, and fields without an effect at their defaults.

    Of two ways to write the same router it is the one with `router_softmax` before the choice.
    """
    usual = ModelConfig.__dataclass_fields__
    idle = {}
    each, numbers = variants(model), variant_numbers(model)
    if len(each) > 1:  # the kinds by number, with all that may differ
        kinds = {f"kind{number}": _explicit(one) for number, one in enumerate(each)}
        own = {kind: {name: getattr(one, name) for name in KIND_FIELDS} for kind, one in kinds.items()}
        has_states = {name: getattr(model, name) for name in STATES} | _states(model)
        pattern = {
            "layer_pattern": layer_pattern_of([f"kind{number}" for number in numbers]),
            "kind_fields": words_of(own),
        }
        alike = {name: usual[name].default for name in KIND_FIELDS} | {"rotated_norm": model.rotated_norm}
        alike |= _growth(model, any(one.query_growth for one in each))
        base = next((one for one in kinds.values() if one.mixer == "attention"), kinds["kind0"])
        return dataclasses.replace(base, **pattern, **alike | has_states)
    model = each[0]
    if model.positions != "rotary":
        idle = {name: field.default for name, field in usual.items() if name.startswith("rotary_")}
        idle["rotated_norm"] = False
    idle |= _growth(model, model.query_growth > 0)
    if model.rotary_scaling != "yarn":
        idle["rotary_truncate"] = True
    if model.activation != "clamped_swiglu":
        idle["activation_limit"] = usual["activation_limit"].default
    used = SCALINGS.get(model.rotary_scaling, {})
    for name in {name for names in SCALINGS.values() for name in names} - set(used):
        idle[name] = usual[name].default
    if not model.experts:
        of_experts = ("experts_per_token", "router_softmax", "router_normalize", "expert_weighted")
        idle |= {name: usual[name].default for name in of_experts}
    elif model.router_softmax == "after":  # the same as a softmax before the choice whose weights are normalized
        idle |= {"router_softmax": "before", "router_normalize": True}
    if model.experts and len(set(kinds := model_kinds(model))) > 1:
        width = model.of_kind(DENSE).feedforward_size
        idle |= {"dense_layers": 0, "moe_layer_freq": pattern_of(kinds), "dense_feedforward": width}
    if model.mixer == "attention":
        idle |= {name: usual[name].default for name in STATES}
    else:
        idle |= _states(model)
        model = dataclasses.replace(model, heads=model.state_heads, head_size=model.state_head_size, kv_heads=None)
    if not model.feedforward_size:
        idle["activation"] = usual["activation"].default
    if not model.query_key_norm:
        idle["query_key_norm_over"] = usual["query_key_norm_over"].default
    if "rotary_original_length" in used and "rotary_original_length" not in idle:
        idle["rotary_original_length"] = model.rotary_original_length or model.sequence_length
    return dataclasses.replace(
        model,
        head_size=model.head_dimension,
        kv_heads=model.key_value_heads,
        feedforward=model.feedforward_size,
        qkv_biases=model.has_qkv_biases,
        output_biases=model.has_output_biases,
        attention_scale=model.attention_scale or model.head_dimension**-0.5,
        value_head_size=model.value_dimension if model.kv_latent else None,
        **({"masked_lm_bias": model.has_masked_lm_bias} if isinstance(model, BertConfig) else {}),
        **idle,
    )

"""Every key of a config.json with other values: logits are those of transformers, or an error says what is not computed.

pip install "megajax[judges]" && pytest -m slow tests/differential/test_every_key.py

A key that transformers reads and megajax does not would give other logits in silence.
"""

import dataclasses
import functools

import numpy as np
import pytest

from megajax.config import ConfigError
from megajax.interop.hugging_face.config import check_written, family_of_model, merge_config, read_config, read_json
from megajax.interop.hugging_face.read_model import initial_params
from tests.interop import described, make_bert_golden, make_golden, make_modernbert_golden
from tests.interop.hugging_face import FAMILIES, logits_of, training_of
from tests.interop.test_bert import outputs_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
# Keys of tokens, of training, of caches and of other tasks; and attributes of all configurations.
OTHERS = ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "model_type", "architectures", "dtype")
OTHERS += (
    "initializer_range",
    "initializer_cutoff_factor",
    "use_cache",
    "output_router_logits",
    "router_aux_loss_coef",
)
OTHERS += ("id2label", "label2id", "problem_type", "is_encoder_decoder", "chunk_size_feed_forward", "return_dict")
OTHERS += ("output_attentions", "output_hidden_states", "transformers_version", "rescale_prenorm_residual")
OTHERS += ("is_decoder", "add_cross_attention", "reorder_and_upcast_attn", "reference_compile", "sparse_prediction")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "relu2", "quick_gelu")
LENGTHS = {"original_max_position_embeddings": 8}
YARN = {"rope_type": "yarn", "factor": 4.0} | LENGTHS
ROTATIONS = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | LENGTHS,
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    YARN,
    YARN | {"truncate": False, "beta_fast": 4.0},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    YARN | {"attention_factor": 1.3},
)


def bert(prefix: str, **settings):
    """A BERT's configuration."""
    return getattr(transformers, f"{prefix}Config")(**settings, attn_implementation="eager")


@functools.cache
def configs() -> dict:
    """A configuration of each family; those with a description have three layers."""
    berts = {name: bert(prefix, **make_bert_golden.SIZES) for name, prefix in make_bert_golden.FAMILIES.items()}
    berts["modernbert"] = bert("ModernBert", **make_modernbert_golden.SIZES)
    return {**make_golden.configs(), **described.configs(3), **berts}


def longrope(config, length: int) -> dict:
    """Rotations by two factors of each pair of elements, of texts up to this length and of longer ones."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    pairs = np.arange(int(size * part) // 2, dtype=float)
    factors = {"short_factor": [*(1 + pairs / 8)], "long_factor": [*(2 + pairs * 1.5)], "factor": 4.0}
    return {"rope_type": "longrope", "original_max_position_embeddings": length} | factors


def other_values(key: str, value, config):
    """Values of a key that are not its own; most are legal."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, str):
        return [one for one in ACTIVATIONS if one != value] if "act" in key else ["another"]
    if isinstance(value, int):
        return [value + 1, value * 2, value // 2, None]
    if isinstance(value, float):
        return [value * 2, None]
    if value is None:
        return [True, 2, 0.5, 5]
    if isinstance(value, list):
        kinds = {"full_attention", "sliding_attention", *value} if isinstance((value or [0])[0], str) else {0, 1}
        return [value[::-1], *([kind] * len(value) for kind in sorted(kinds)), None]
    if key != "rope_parameters":
        return []
    rotations = [*ROTATIONS, longrope(config, 8), longrope(config, 64)]
    if all(isinstance(one, dict) for one in value.values()):  # of each type of layers
        return [value | {kind: value[kind] | one} for kind in value for one in rotations]
    base = {name: value[name] for name in ("rope_theta", "partial_rotary_factor") if name in value}
    numbers = {name: one for name, one in value.items() if type(one) in (int, float)}
    return [base | one for one in rotations] + [value | {name: one * 2} for name, one in numbers.items()]


def cases(config):
    """Configurations that differ in one key, and what that key is."""
    keys = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    for key, value in keys.items():
        for other in () if key in OTHERS or key.startswith("classifier_") else other_values(key, value, config):
            try:
                changed = type(config)(**{name: one for name, one in keys.items() if name != "dtype"} | {key: other})
            except Exception:  # transformers has many types of errors for values that are not legal
                continue
            if changed.to_dict().get(key) != value:
                yield f"{key} = {other!r}", changed


def judged(config, directory):
    """The logits of transformers' model, whose files are written; None if it has none for this configuration."""
    try:
        if "bert" not in config.model_type:
            model = described.random_model(config)
            with torch.no_grad():
                found = model(torch.from_numpy(make_golden.tokens())).logits.float().numpy()
        elif config.model_type == "modernbert":
            model = make_modernbert_golden.random_modernbert(**config.to_dict())
            found = make_modernbert_golden.logits_of(model)
        else:
            prefix = type(config).__name__.removesuffix("Config")
            model = make_bert_golden.random_bert(prefix, **config.to_dict())
            found = make_bert_golden.outputs(model)["prediction_logits"]
        model.save_pretrained(directory)
    except Exception:
        return None
    return found if np.isfinite(found).all() else None


def computed(directory):
    """Our logits."""
    model = read_config(directory)[1]
    model = dataclasses.replace(model, sequence_length=min(model.sequence_length, make_golden.LENGTH), dropout=0.0)
    training = training_of(model)
    params = initial_params(str(directory), training)
    if not hasattr(model, "has_masked_lm"):
        return logits_of(training, params)
    given = make_modernbert_golden if model.token_types == 0 else make_bert_golden
    return outputs_of(training, params, given.inputs())["words"]


EVERY = pytest.mark.parametrize("family", [*described.FAMILIES, *FAMILIES, *make_bert_golden.FAMILIES, "modernbert"])


@EVERY
def test_an_export_says_what_was_read(family, tmp_path):
    """With the imported config.json and without, which then has all that is not transformers' default."""
    exported = 0
    for _, config in cases(configs()[family]):
        config.save_pretrained(tmp_path)
        try:
            found, model = read_config(tmp_path)
        except ConfigError:
            continue
        same, keys = family_of_model(model, found.name)
        for original in ({}, read_json(tmp_path / "config.json")):
            check_written(merge_config(original, keys, "float32"), same, model)
        exported += 1
    assert exported > 5


@EVERY
def test_a_key_is_read_or_refused(family, tmp_path):
    wrong, compared = [], 0
    for number, (change, config) in enumerate(cases(configs()[family])):
        wanted = judged(config, directory := tmp_path / f"{family}-{number}")
        if wanted is None:
            continue
        try:
            found = computed(directory)
        except ConfigError:
            continue
        compared += 1
        if "bert" in family:  # without those of padding
            real = np.arange(wanted.shape[1]) < wanted.shape[1] - make_bert_golden.PADDING[:, None]
            found, wanted = found[real], wanted[real]
        if not np.abs(found - wanted).max() <= 1e-4:
            wrong.append(change)
    assert compared > 5 and not wrong

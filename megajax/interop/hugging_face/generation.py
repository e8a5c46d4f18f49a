"""The generation settings of a Hugging Face directory, as transformers' `model.generation_config` has them.

They are in generation_config.json, or in config.json of models from before there was such a file. Every field of
transformers' GenerationConfig is one of three kinds: it is applied (`GenerationSettings.sampling`), it changes no token of
a text (`WITHOUT_EFFECT`), or a value other than its default is refused by name (`REFUSED`, and fields that newer versions
of transformers add).
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError
from megajax.config.sample import LogitsRules, SampleConfig
from megajax.data.hugging_face import library
from megajax.schedules.errors import one_line, shown

__all__ = ["REFUSED", "USUAL_NEW_TOKENS", "WITHOUT_EFFECT", "GenerationSettings", "read_generation"]

USUAL_NEW_TOKENS = 128  # of models without settings
LEAST_TOP_P = 1e-30  # transformers' 0: the most likely token alone

# Read by `_settings`, or by nobody but the user.
APPLIED = frozenset(
    "begin_suppress_tokens bad_words_ids do_sample eos_token_id epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
    "forced_bos_token_id forced_eos_token_id max_length max_new_tokens min_length min_new_tokens min_p "
    "no_repeat_ngram_size remove_invalid_values repetition_penalty sequence_bias stop_strings suppress_tokens temperature "
    "top_h top_k top_p typical_p".split()
)
# Outputs, caches, compilation, padding, metadata, and parameters of methods that REFUSED has.
WITHOUT_EFFECT = frozenset(
    "assistant_confidence_threshold assistant_ensemble_weight assistant_lookbehind bos_token_id cache_config "
    "cache_implementation compile_config continuous_batching_config decoder_start_token_id disable_compile "
    "diversity_penalty early_stopping is_assistant length_penalty low_memory max_cache_len max_matching_ngram_size "
    "num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states output_logits "
    "output_scores pad_token_id prefill_chunk_size renormalize_logits return_dict_in_generate speculation_type "
    "target_lookbehind transformers_version use_cache".split()
)
REFUSED = {
    "assistant_early_exit": "assisted generation",
    "constraints": "constrained beam search",
    "dola_layers": "DoLa",
    "encoder_no_repeat_ngram_size": "a penalty of the prompt alone",
    "encoder_repetition_penalty": "a penalty of the prompt alone",
    "force_words_ids": "constrained beam search",
    "guidance_scale": "classifier-free guidance",
    "max_time": "a limit in seconds",
    "num_beam_groups": "beam search",
    "num_beams": "beam search",
    "num_return_sequences": "several texts of a prompt",
    "penalty_alpha": "contrastive search",
    "prompt_lookup_num_tokens": "assisted generation",
    "token_healing": "token healing",
    "use_mtp": "multi-token prediction",
    "watermarking_config": "watermarks",
}
HARMLESS = {"guidance_scale": 1, "num_beams": 1, "penalty_alpha": 0}  # beside transformers' own defaults


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """What a model's files say about generation.

    Attributes:
      path: of the file; None: the model has none, and the defaults of megajax apply.
      ends: tokens that end a text.
      samples: whether tokens are sampled; the most likely ones are taken otherwise.
      draws: `SampleConfig`'s fields, without the prompt and the number of new tokens.
      rules: what the scores are changed by besides.
      stops: texts that end a text.
      new_tokens, max_length: most new tokens, or else tokens of prompt and text; None: not set.
      named: the fields that the file sets and that matter here, with their values.
      problem: why text cannot be generated as the file says; "" if it can.
    """

    path: pathlib.Path | None
    ends: tuple[int, ...]
    samples: bool = True
    draws: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rules: LogitsRules = LogitsRules()
    stops: tuple[str, ...] = ()
    new_tokens: int | None = None
    max_length: int | None = None
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problem: str = ""

    def without_draws(self) -> "GenerationSettings":
        """The ends alone."""
        return GenerationSettings(None, self.ends)

    def sampling(self, given: Mapping[str, Any]) -> tuple[SampleConfig, LogitsRules]:
        """How tokens are drawn, with options of a command line before the file's values.

        An option of the sampling (--temperature above 0, --top-k, --top-p, --min-p) makes a greedy model sample.

        Args:
          given: `SampleConfig`'s fields.

        Raises:
          ConfigError: the file has a setting that is not implemented, or an illegal value.
        """
        if self.problem:
            raise ConfigError(self.problem)
        values = {**self.draws, **given}
        drawing = any(given.get(name) is not None for name in ("temperature", "top_k", "top_p", "min_p"))
        if not self.samples and not drawing:
            values["temperature"] = 0.0
        rules = self.rules
        if "min_new_tokens" in given:  # as in transformers, of which it sets min_length
            rules = dataclasses.replace(rules, min_length=0)
        if "new_tokens" not in values and self.new_tokens is None and self.max_length is not None:
            values["new_tokens"] = max(1, self.max_length - 1)
            rules = dataclasses.replace(rules, max_length=self.max_length)
        values.setdefault("new_tokens", self.new_tokens or USUAL_NEW_TOKENS)
        config = SampleConfig(**values)
        config.validate()
        return config, rules

    def describe(self, given: Mapping[str, Any]) -> str:
        """What the file says, without the fields that `given` has; "" if there is no file."""
        if self.path is None:
            return ""
        own = {"max_new_tokens": "new_tokens", "max_length": "new_tokens", "do_sample": "temperature"}
        used = {name: value for name, value in self.named.items() if own.get(name, name) not in given}
        listed = [f"{name} {shown(value)}" for name, value in used.items()]
        ends = f"ends at token {', '.join(map(str, self.ends))}" if self.ends else "no token ends a text"
        return f"from {self.path}: {', '.join([*listed, ends])}"


def read_generation(folder: pathlib.Path | None, end_of_document: int) -> GenerationSettings:
    """The settings of a directory.

    Args:
      folder: with generation_config.json or config.json; None, or without them: the model has no settings.
      end_of_document: the end of texts of a model without settings.

    Raises:
      ConfigError: a file is damaged or has illegal values, or transformers is not installed.
    """
    names = ("generation_config.json", "config.json")
    path = next((folder / name for name in names if (folder / name).is_file()), None) if folder else None
    if path is None:
        return GenerationSettings(None, (end_of_document,))
    kind = library(f"the generation settings in {path}").GenerationConfig
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"a JSON {type(values).__name__}, not an object")
        config = kind.from_model_config(values) if path.name == "config.json" else kind.from_dict(values)
        return _settings(path, config, kind())
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, LookupError, RecursionError, AttributeError) as error:
        reason = one_line(str(error)) or type(error).__name__
        raise ConfigError(f"cannot read the generation settings in {path}: {reason}; correct the file.") from None


def _settings(path: pathlib.Path, config: Any, usual: Any) -> GenerationSettings:
    """The settings of transformers' GenerationConfig; `usual` is one without any value."""
    defaults = {**vars(usual), **config._get_default_generation_params()}
    found = {name: value for name, value in vars(config).items() if name in vars(usual) and not name.startswith("_")}

    def value(name: str, default: Any = None) -> Any:
        """The field's value, or transformers' default."""
        got = found.get(name)
        return got if got is not None else defaults.get(name) if defaults.get(name) is not None else default

    ends = _ids("eos_token_id", value("eos_token_id", []))
    top_p, penalty = float(value("top_p")), float(value("repetition_penalty"))
    draws = {
        "temperature": float(value("temperature")),
        "top_k": _whole("top_k", value("top_k")) or None,
        "top_p": max(top_p, LEAST_TOP_P) if top_p >= 0 else top_p,
        "min_p": float(value("min_p", 0.0)),
        "repetition_penalty": penalty,
        "no_repeat_ngram_size": _whole("no_repeat_ngram_size", value("no_repeat_ngram_size")),
        "min_new_tokens": _whole("min_new_tokens", value("min_new_tokens", 0)),
    }
    bias = value("sequence_bias", [])
    decay = value("exponential_decay_length_penalty")
    first = value("forced_bos_token_id")
    rules = LogitsRules(
        ends=ends,
        min_length=0 if value("min_new_tokens") is not None else _whole("min_length", value("min_length")),
        suppress_tokens=_ids("suppress_tokens", value("suppress_tokens", [])),
        begin_suppress_tokens=_ids("begin_suppress_tokens", value("begin_suppress_tokens", [])),
        sequence_bias=tuple((_sequence("sequence_bias", tokens), float(amount)) for tokens, amount in bias),
        bad_words=tuple(
            tokens
            for tokens in (_sequence("bad_words_ids", one) for one in value("bad_words_ids", []))
            if tokens not in [(end,) for end in ends]
        ),
        forced_bos=None if first is None else _whole("forced_bos_token_id", first),
        forced_eos=_ids("forced_eos_token_id", value("forced_eos_token_id", [])),
        exponential_decay_length_penalty=decay and (_whole("its first value", decay[0]), float(decay[1])),
        remove_invalid_values=value("remove_invalid_values") is True,
        top_h=None if value("top_h") is None else _share("top_h", value("top_h")),
        typical_p=_share("typical_p", value("typical_p")),
        epsilon_cutoff=float(value("epsilon_cutoff")),
        eta_cutoff=float(value("eta_cutoff")),
    )
    stops = value("stop_strings", [])
    matter = {
        name: one for name, one in found.items() if name not in WITHOUT_EFFECT and one not in (None, defaults.get(name))
    }
    refused = {name: one for name, one in matter.items() if name not in APPLIED and HARMLESS.get(name) != one}
    return GenerationSettings(
        path,
        ends,
        value("do_sample") is True,
        draws,
        rules,
        tuple(filter(None, [stops] if isinstance(stops, str) else [str(stop) for stop in stops])),
        None if value("max_new_tokens") is None else _whole("max_new_tokens", value("max_new_tokens")),
        None if found.get("max_length") is None else _whole("max_length", found["max_length"]),
        {name: one for name, one in matter.items() if name in APPLIED and name != "eos_token_id"},
        next((_refusal(path, name, one) for name, one in refused.items()), ""),
    )


def _refusal(path: pathlib.Path, name: str, value: Any) -> str:
    meaning = f" ({REFUSED[name]})" if name in REFUSED else ""
    return (
        f"{path} has {name} = {shown(value)}{meaning}, which megajax does not have: remove it from the file, or pass "
        "--generation-config none to use the file's end tokens alone."
    )


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or value != int(value):
        raise ValueError(f"{name} = {shown(value)} must be a whole number")
    return int(value)


def _share(name: str, value: Any) -> float:
    if not 0 < float(value) <= 1:
        raise ValueError(f"{name} = {shown(value)} must be above 0 and at most 1")
    return float(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """The tokens of a field that has one or several; negative ones, which no vocabulary has, are left out."""
    tokens = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(token for token in (_whole(name, one) for one in tokens) if token >= 0))


def _sequence(name: str, value: Any) -> tuple[int, ...]:
    tokens = tuple(_whole(name, one) for one in value)
    if not tokens or min(tokens) < 0:
        raise ValueError(f"{name} has {shown(value)}, which must be one or more tokens")
    return tokens

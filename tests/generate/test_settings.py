"""Generation settings of Hugging Face directories, against the goldens of transformers (make_golden.py)."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import ConfigError, ParallelConfig
from megajax.config.sample import LogitsRules, SampleConfig
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
from megajax.generate.sampling import draw
from megajax.generate.text import Ending, Sample, Speed, continue_prompts
from megajax.interop.hugging_face import generation
from megajax.interop.hugging_face.generation import read_generation
from megajax.interop.weight_source import HuggingFaceSource
from megajax.runtime.mesh import make_mesh
from tests.generate.make_golden import FAMILIES, FOLDER, GREEDY, NEW, PROMPTS, SAMPLED, VOCABULARY, scores
from tests.interop.hugging_face import golden

QUICK = [("llama", "all", (1, 1, 1)), ("qwen3", "bias", (1, 2, 1))]
MESHES = [("llama", "all", (1, 2, 2)), ("llama", "no_repeat_ngram_size 3", (2, 2, 1)), ("gpt2", "bad words", (1, 4, 1))]
ALL = [(family, name, (1, 1, 1)) for family in FAMILIES for name in GREEDY] + MESHES + QUICK[1:]


def settings_of(folder: pathlib.Path, values: dict, name: str = "generation_config.json"):
    """Those of a directory with a file of such values."""
    (folder / name).write_text(json.dumps(values))
    return read_generation(folder, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "mesh"),
    [pytest.param(*case, id="-".join(map(str, case)), marks=() if case in QUICK else pytest.mark.slow) for case in ALL],
)
def test_greedy_texts_are_those_of_transformers(family, name, mesh, tmp_path):
    settings = settings_of(tmp_path, GREEDY[name])
    source = HuggingFaceSource(str(golden(family)))
    data, pipe, tensor = mesh
    run = decoding_run(source.run("fp32"), ParallelConfig(data=data, pipe=pipe, tensor=tensor))
    sampling, rules = settings.sampling({"new_tokens": NEW})
    assert sampling.temperature == 0
    decoder = Decoder(run, make_mesh(run.parallel), DecodeSizes(3, 7, NEW, 3), sampling, logits_rules=rules)
    ending = Ending(NEW, run.model.sequence_length, (), frozenset(settings.ends))
    samples = [
        Sample(number, np.array(prompt, np.int32), ending, source.tokenizer) for number, prompt in enumerate(PROMPTS)
    ]
    continue_prompts(decoder, source.load(decoder), samples, Speed())
    wanted = json.loads((FOLDER / "golden.json").read_text())[family][name]
    for sample, tokens in zip(samples, wanted, strict=True):
        ended = tokens[-1] in settings.ends
        hidden = ended and tokens[-1] == source.tokenizer.end_of_document
        assert sample.tokens == tokens[: len(tokens) - hidden]
        assert sample.finish == ("end" if ended else "length")


@pytest.mark.parametrize("name", SAMPLED)
def test_tokens_that_may_be_drawn_are_those_of_transformers(name, tmp_path):
    """Each token that is left is drawn at least once in 4,000 draws if its probability is above 1 in 200."""
    sampling, rules = settings_of(tmp_path, {**SAMPLED[name], "do_sample": True}).sampling({})
    wanted = np.load(FOLDER / "golden.npz")[name]
    count = 4000
    for row in range(len(wanted)):
        logits = jnp.broadcast_to(scores()[row], (count, VOCABULARY))
        drawn = draw(logits, jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.int32), sampling, 0, rules)
        drawn = np.bincount(drawn, minlength=VOCABULARY)
        assert not drawn[~wanted[row]].any()
        share = np.where(wanted[row], np.exp(scores()[row] / sampling.temperature), 0)
        assert drawn[share / share.sum() > 1 / 200].all()


def test_every_field_of_transformers_is_of_one_kind():
    from megajax.data.hugging_face import library

    fields = {name for name in vars(library("a test").GenerationConfig()) if not name.startswith("_")}
    kinds = [generation.APPLIED, generation.WITHOUT_EFFECT, frozenset(generation.REFUSED)]
    assert fields <= frozenset().union(*kinds) and sum(map(len, kinds)) == len(frozenset().union(*kinds))


REFUSED = {
    "num_beams": 4,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "num_return_sequences": 2,
    "max_time": 3.0,
    "dola_layers": "high",
    "prompt_lookup_num_tokens": 3,
    "encoder_repetition_penalty": 1.2,
    "token_healing": True,
    "watermarking_config": {"greenlist_ratio": 0.5},
    "constraints": [1],
    "force_words_ids": [[1]],
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_not_there_are_refused_by_name(name, tmp_path):
    settings = settings_of(
        tmp_path, {name: REFUSED[name], "eos_token_id": [3, 5], "do_sample": name != "penalty_alpha"}
    )
    with pytest.raises(
        ConfigError, match=rf"generation_config.json has {name} = .*pass --generation-config none"
    ) as error:
        settings.sampling({})
    assert "\n" not in str(error.value)
    alone = settings.without_draws()
    assert alone.ends == (3, 5) and alone.sampling({})[0] == SampleConfig(new_tokens=128)


def test_defaults_are_no_settings(tmp_path):
    """Values that change nothing, in a file as transformers writes it."""
    values = {
        "num_beams": 1,
        "guidance_scale": 1.0,
        "penalty_alpha": 0.0,
        "temperature": 1.0,
        "use_cache": False,
        "my": 3,
    }
    settings = settings_of(tmp_path, values | {"cache_implementation": "static", "pad_token_id": 3, "eos_token_id": 7})
    sampling, rules = settings.sampling({})
    assert (sampling.temperature, rules, settings.ends) == (0, LogitsRules(ends=(7,)), (7,))
    assert settings.describe({}) == f"from {tmp_path / 'generation_config.json'}: ends at token 7"


def test_where_settings_are_read_from(tmp_path):
    assert read_generation(None, 9).ends == read_generation(tmp_path, 9).ends == (9,)
    assert read_generation(tmp_path, 9).sampling({})[0] == SampleConfig(new_tokens=128)
    old = settings_of(tmp_path, {"eos_token_id": 4, "repetition_penalty": 1.5, "hidden_size": 8}, "config.json")
    assert old.ends == (4,) and old.sampling({})[0].repetition_penalty == 1.5
    new = settings_of(tmp_path, {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 5})
    assert new.ends == () and "no token ends a text" in new.describe({})
    assert new.sampling({})[0] == SampleConfig(new_tokens=5, temperature=0.6, top_k=50, top_p=0.9)


@pytest.mark.parametrize(
    ("values", "given", "wanted"),
    [
        ({"temperature": 0.6}, {}, {"temperature": 0.0}),  # do_sample is false
        ({"temperature": 0.6}, {"top_p": 0.5}, {"temperature": 0.6, "top_p": 0.5}),
        ({}, {"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": True}, {"temperature": 0.0}, {"temperature": 0.0}),
        ({"do_sample": True, "top_k": 0}, {}, {"temperature": 1.0, "top_k": None}),
        ({"max_length": 10}, {}, {"temperature": 0.0, "new_tokens": 9}),
        ({"max_length": 10}, {"new_tokens": 20}, {"temperature": 0.0, "new_tokens": 20}),
        ({"max_length": 10, "max_new_tokens": 4}, {}, {"temperature": 0.0, "new_tokens": 4}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.0}, {"temperature": 0.0}),
    ],
)
def test_options_come_before_settings(values, given, wanted, tmp_path):
    found = settings_of(tmp_path, values).sampling(given)[0]
    assert found == SampleConfig(**{"new_tokens": 128, "top_k": 50} | wanted)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 1.5}, "top_p = 1.5 must be above 0 and at most 1: pass --top-p"),
        ({"min_p": 3}, "min_p = 3.0 must be 0 or more and at most 1: pass --min-p"),
        ({"temperature": -1, "do_sample": True}, "temperature = -1.0 must be a number, 0 or more"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0.0 must be a number, above 0"),
        ({"eos_token_id": "</s>"}, "cannot read the generation settings in .*correct the file"),
        ({"max_new_tokens": 0}, "cannot read the generation settings in .*max_new_tokens"),
        ({"bad_words_ids": [[]]}, "bad_words_ids has \\[\\], which must be one or more tokens"),
        ([], "a JSON list, not an object"),
    ],
)
def test_illegal_values_are_one_line(values, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        settings_of(tmp_path, values).sampling({})
    assert "\n" not in str(error.value)


def test_tokens_outside_of_the_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="bad_words_ids .* has token 64, but the model has tokens 0 to 63"):
        LogitsRules(bad_words=((3, 64),)).validate(64)
    LogitsRules(bad_words=((3, 63),), ends=(99,), suppress_tokens=(99,)).validate(64)

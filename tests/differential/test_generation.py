"""Random generation settings, tokens and prompts against transformers: scores, texts with their ends, whole continuations.

The scores are those of transformers' logits processors, so PyTorch is needed (megajax[judges]).
"""

import functools
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import ConfigError
from megajax.data.tokenizers import load_tokenizer
from megajax.generate.sampling import Texts, apply_rules, sampled_scores
from megajax.generate.text import Ending, Sample
from megajax.interop.hugging_face.generation import read_generation
from tests.differential.many import FEW, many
from tests.differential.random_tokenizers import texts, tokenizers, write
from tests.generate.make_golden import MODELS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY, SLOTS, NEW = 64, 20, 12
token, share = st.integers(0, VOCABULARY - 1), st.floats(0.01, 0.99)
some = st.lists(token, min_size=1, max_size=6)
sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4)
FIELDS = {
    "temperature": st.floats(0.1, 3.0),
    "top_k": st.integers(0, 70),
    "top_p": share,
    "min_p": st.floats(0.0, 0.5),
    "top_h": share,
    "typical_p": share,
    "epsilon_cutoff": st.floats(0.001, 0.2),
    "eta_cutoff": st.floats(0.001, 0.5),
    "repetition_penalty": st.floats(0.3, 2.5),
    "no_repeat_ngram_size": st.integers(0, 4),
    "bad_words_ids": sequences,
    "sequence_bias": st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.floats(-9.0, 9.0)).map(list),
        min_size=1,
        max_size=4,
    ),
    "min_length": st.integers(0, 12),
    "min_new_tokens": st.integers(0, 6),
    "suppress_tokens": some,
    "begin_suppress_tokens": some,
    "forced_bos_token_id": token,
    "forced_eos_token_id": st.one_of(token, some),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 5), st.floats(0.8, 2.0)).map(list),
    "remove_invalid_values": st.booleans(),
    "renormalize_logits": st.booleans(),
    "use_cache": st.booleans(),
    "pad_token_id": token,
}
ends = st.one_of(st.integers(0, 5), some)
generation = st.tuples(
    st.fixed_dictionaries({"eos_token_id": ends, "do_sample": st.booleans()}),
    st.lists(st.sampled_from(sorted(FIELDS)), max_size=5, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
    ),
).map(lambda parts: parts[0] | parts[1])


def settings_of(values: dict):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "generation_config.json").write_text(json.dumps(values))
        return read_generation(pathlib.Path(folder), 0)


@functools.cache
def gpt2():
    return transformers.AutoModelForCausalLM.from_pretrained(MODELS / "gpt2")


def judged_scores(values: dict, ids: list[int], prompt: int, logits: np.ndarray) -> np.ndarray:
    """The scores after transformers' logits processors."""
    model = gpt2()
    model.generation_config = transformers.GenerationConfig.from_dict(dict(values))
    config = model._prepare_generation_config(None, max_new_tokens=NEW)[0]
    model._prepare_special_tokens(config, False, device="cpu")
    config = model._prepare_generated_length(config, True, values.get("min_length") is None, "input_ids", prompt, None)
    processors = model._get_logits_processor(config, input_ids_seq_length=prompt, device="cpu")
    return processors(torch.tensor([ids]), torch.from_numpy(logits)).numpy()


def check_scores(values: dict, ids: list[int], prompt: int, seed: int) -> None:
    """Raises AssertionError if the scores of the next token differ."""
    prompt = min(prompt, len(ids))
    logits = (np.random.default_rng(seed).normal(size=(1, VOCABULARY)) * 3).astype(np.float32)
    try:
        wanted = judged_scores(values, ids, prompt, logits)
    except ValueError:  # such as a token that is forced and suppressed
        with pytest.raises(ConfigError):
            settings_of(values).sampling({"new_tokens": NEW})
        return
    sampling, rules = settings_of(values).sampling({"new_tokens": NEW})
    start = (SLOTS - len(ids)) // 2  # what is in other slots has no meaning
    slots = np.full((1, SLOTS), 1, np.int32)
    slots[0, start : start + len(ids)] = ids
    of = lambda value: jnp.array([value], jnp.int32)  # noqa: E731
    found = apply_rules(
        jnp.asarray(logits), Texts(jnp.array(slots), of(start), of(start + len(ids))[0], of(prompt)), sampling, rules
    )
    if sampling.temperature:
        found = sampled_scores(found, sampling, rules)
    found = np.asarray(found)
    kept = np.isfinite(wanted)
    if values.get("renormalize_logits"):
        found = np.asarray(jax.nn.log_softmax(found))
    # A sum of probabilities that is a threshold up to rounding decides otherwise for one token.
    assert (np.isfinite(found) != kept).sum() <= 1
    both = kept & np.isfinite(found)
    if not values.get("renormalize_logits") or (np.isfinite(found) == kept).all():
        np.testing.assert_allclose(found[both], wanted[both], rtol=2e-4, atol=2e-4)
    if (np.isfinite(found) == kept).all() and kept.any():
        assert found.argmax() == wanted.argmax()


SCORES = generation, st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 2**31)


@given(*SCORES)
@settings(max_examples=60, **FEW)
def test_scores(values, ids, prompt, seed):
    check_scores(values, ids, prompt, seed)


@pytest.mark.slow
def test_many_scores(capsys):
    many(check_scores, 2000, capsys, *SCORES)


def check_texts(tokenizer, prompt: str, numbers: list[int], ends: list[int], stops: list[str]) -> None:
    """Raises AssertionError if a text ends elsewhere, or is decoded otherwise."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder, *tokenizer)
        load_tokenizer.cache_clear()
        try:
            judge = transformers.AutoTokenizer.from_pretrained(folder)
            ours = load_tokenizer(name)
        except Exception:  # tests/differential/test_tokenizers.py
            return
    before = judge(prompt)["input_ids"]
    vocabulary = len(judge)
    tokens, ends = [number % vocabulary for number in numbers], frozenset(number % vocabulary for number in ends)
    if not before:
        return
    try:
        stop = transformers.StopStringCriteria(judge, stops) if stops else None
    except Exception:  # it cannot take some vocabularies
        return
    count, reason = len(tokens), "length"
    for number, one in enumerate(tokens, 1):
        stopped = stop is not None and bool(stop(torch.tensor([before + tokens[:number]]), None)[0])
        if one in ends or stopped:
            count, reason = number, "both" if one in ends and stopped else "stop" if stopped else "end"
            break
    sample = Sample(0, np.array(before, np.int32), Ending(len(tokens), 10**6, tuple(stops), ends), ours)
    for first in range(0, len(tokens), 3):
        sample.extend(tokens[first : first + 3])
    whole = judge.decode([*before, *tokens[:count]], skip_special_tokens=True)
    wanted = whole[len(judge.decode(before, skip_special_tokens=True)) :]
    if reason in ("stop", "both"):  # transformers keeps the stop
        assert sample.finish in ("stop", "end") if reason == "both" else sample.finish == "stop"
        assert wanted.startswith(sample.text) and len(sample.tokens) in (count, count - (reason == "both"))
        return
    assert (sample.finish, sample.text) == (reason, wanted)


TEXTS = (
    tokenizers(),
    texts,
    st.lists(st.integers(0, 10**4), min_size=1, max_size=10),
    st.lists(st.integers(0, 10**4), max_size=40),
    st.one_of(st.just([]), st.lists(st.sampled_from(["fox", "o", " j", "\n", "dog's", "e\u0301", "<s>"]), max_size=2)),
)


@given(*TEXTS)
@settings(max_examples=40, **FEW)
def test_texts(tokenizer, prompt, numbers, ends, stops):
    check_texts(tokenizer, prompt, numbers, ends, stops)


@pytest.mark.slow
def test_many_texts(capsys):
    many(check_texts, 1000, capsys, *TEXTS)

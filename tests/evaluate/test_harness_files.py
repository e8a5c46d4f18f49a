"""Models with files of their own, at the edges: the same requests through lm-eval's `hf` (transformers) and through ours.

pip install "megajax[judges,eval]" && pytest -m slow tests/evaluate/test_harness_files.py
"""

import json
import pathlib
import random
import shutil

import pytest

from megajax.config import ParallelConfig
from megajax.evaluate.__main__ import main
from megajax.evaluate.scorer import evaluation_run, make_scorer
from megajax.interop.weight_source import HuggingFaceSource
from megajax.runtime.mesh import make_mesh
from tests.evaluate.test_harness import instances, write_tasks
from tests.interop.hugging_face import golden

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}{% if message.role == 'system' %}{% if loop.index0 %}"
    "{{ raise_exception('system first') }}{% endif %}{{ message.content }} ab\n{% else %}"
    "{{ 'ba ' if message.role == 'user' else 'da ' }}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}da{% endif %}"
)
NO_SYSTEM = TEMPLATE.replace("{% if loop.index0 %}", "{% if true %}")
# kind of tokenizer, special tokens, what the post-processor puts around a text, generation settings, template
CASES = {
    "bytes, nothing": ("bytes", {"eos_token": "</s>"}, None, {"eos_token_id": [1, 40, 50, 61, 30]}, TEMPLATE),
    "bytes, bos": ("bytes", {"bos_token": "<s>", "eos_token": "</s>"}, "<s> $A", {"repetition_penalty": 1.4}, TEMPLATE),
    "bytes, unused bos": (
        "bytes",
        {"bos_token": "<s>", "eos_token": "</s>"},
        None,
        {"suppress_tokens": [9]},
        NO_SYSTEM,
    ),
    "metaspace, bos": (
        "metaspace",
        {"bos_token": "<s>", "eos_token": "</s>"},
        "<s> $A",
        {"eos_token_id": 44},
        TEMPLATE,
    ),
    "metaspace, both": ("metaspace", {"bos_token": "<s>", "eos_token": "</s>"}, "<s> $A </s>", {}, NO_SYSTEM),
    "metaspace, nothing": ("metaspace", {"eos_token": "ab"}, None, {"no_repeat_ngram_size": 2}, TEMPLATE),
}
SPECIAL = {"<s>": 0, "</s>": 1, "<unk>": 2}


def make_tokenizer(kind: str, special: dict, around: str | None, template: str, directory: pathlib.Path) -> None:
    """A tokenizer of 64 tokens: BPE of bytes without the rare ones, or BPE with Metaspace; with merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    space = "\u0120" if kind == "bytes" else "\u2581"
    letters = [*"abcdefgh", space, *(("\u010a", "\u0109") if kind == "bytes" else ("\n", "\t")), ".", ","]
    merges = [(first, second) for first in [space, *"abcd"] for second in "abcdef"][:24]
    merges += [(space + "a", "b"), (space + "b", "a"), ("ab", "c"), ("cd", "ab"), (space + "c", "da"), (space, space)]
    vocabulary = dict(SPECIAL)
    for piece in [*letters, *("".join(pair) for pair in merges)]:
        vocabulary.setdefault(piece, len(vocabulary))
    for number in range(len(vocabulary), 64):
        vocabulary[f"<{number}>"] = number
    merges = [pair for pair in merges if all(one in vocabulary for one in pair)]
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    if kind == "bytes":
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(["<s>", "</s>", "<unk>"])
    if around:
        inner.post_processor = processors.TemplateProcessing(around, None, list(SPECIAL.items()))
    inner.save(str(directory / "tokenizer.json"))
    settings = special | {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module", params=CASES)
def directory(request, tmp_path_factory) -> pathlib.Path:
    """The golden llama with such files."""
    for library in ("lm_eval", "torch", "transformers"):
        pytest.importorskip(library)
    found = pathlib.Path(shutil.copytree(golden("llama"), tmp_path_factory.mktemp("model") / "llama"))
    kind, special, around, settings, template = CASES[request.param]
    make_tokenizer(kind, special, around, template, found)
    (found / "generation_config.json").write_text(json.dumps(settings))
    return found


@pytest.fixture(scope="module")
def judge(directory):
    """lm-eval's model of type hf, one text at a time: whether texts begin with <s> is decided for a batch."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=1)


@pytest.fixture(scope="module")
def ours(directory):
    """The same of ours."""
    from megajax.evaluate.harness import HarnessModel

    source = HuggingFaceSource(str(directory))
    scorer = make_scorer(evaluation_run(source.run("fp32"), ParallelConfig()), make_mesh(ParallelConfig()), samples=8)
    return HarnessModel(scorer, source.load(scorer), source.tokenizer, source.hugging_face)


def text(draw: random.Random, most: int) -> str:
    words = ["ab", "ba", "cda", "abc", " ", "  ", "\n", "\t", ".", "h", "<s>", "</s>", "cdab", "\n\n", "eg"]
    return draw.choice(["", " "]).join(draw.choices(words, k=draw.randint(0, most)))


def test_log_likelihoods_of_any_texts(judge, ours):
    """Those that the judge takes; of the others a right number, or a refusal."""
    from megajax.config import ConfigError

    draw = random.Random(0)
    pairs = [
        ("  ", "ab"),
        ("", "ab"),
        ("\n", " ab"),
        ("<s>", "ab"),
        ("<s> ab", "c"),
        ("", "<s>ab"),
        ("", "</s>ab"),
        ("a", "b"),
    ]
    pairs += [(text(draw, draw.choice((2, 5, 150))), text(draw, draw.choice((1, 3, 9)))) for _ in range(60)]
    compared = 0
    for pair in pairs:
        try:
            [expected] = judge.loglikelihood(instances("loglikelihood", [pair]), disable_tqdm=True)
        except (AssertionError, IndexError):  # no context, or no continuation
            expected = None
        try:
            [found] = ours.loglikelihood(instances("loglikelihood", [pair]))
        except ConfigError as error:
            assert expected is None and "\n" not in str(error)
            continue
        compared += expected is not None
        if expected is None:  # a context of spaces
            assert pair[0].strip() == "" and found[0] < -1e-3
            continue
        assert found == (pytest.approx(expected[0], abs=2e-4), expected[1]), pair
    assert compared > 30


def test_documents_of_any_kind(judge, ours):
    draw = random.Random(1)
    texts = ["", " ", "\n", "<s>", "<s>ab", "ab", *(text(draw, draw.choice((3, 40, 300))) for _ in range(12))]
    requests = instances("loglikelihood_rolling", [(one,) for one in texts])
    expected = judge.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(expected, rel=1e-6, abs=2e-4)


def test_texts_of_any_contexts(judge, ours):
    draw = random.Random(2)
    requests = [
        (
            text(draw, draw.choice((4, 150))) + "ab",
            {"until": draw.choice([[], ["\n"], ["ab", "c"], ["</s>"], [" "]]), "max_gen_toks": 25},
        )
        for _ in range(25)
    ]
    requests += [("ab <s>", {"until": [], "max_gen_toks": 9, "repetition_penalty": 1.7, "min_new_tokens": 4})]
    expected = [judge.generate_until(instances("generate_until", [one]), disable_tqdm=True)[0] for one in requests]
    assert ours.generate_until(instances("generate_until", requests)) == expected
    assert len({len(one) for one in expected}) > 3


def test_settings_that_are_not_there_are_refused(directory, ours, tmp_path):
    """For generated texts alone; the end tokens are used in any case."""
    from megajax.config import ConfigError
    from megajax.evaluate.harness import HarnessModel

    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 3, "eos_token_id": list(range(64))}))
    found = {
        name: HarnessModel(ours.scorer, ours._weights, ours._tokens.tokenizer, tmp_path, generation_config=name)
        for name in ("auto", "none")
    }
    [(likelihood, _)] = found["auto"].loglikelihood(instances("loglikelihood", [("ab", " ba")]))
    assert likelihood < 0
    request = instances("generate_until", [("ab", {"until": [], "max_gen_toks": 5})])
    with pytest.raises(ConfigError, match="num_beams = 3 .beam search., which megajax does not have"):
        found["auto"].generate_until(request)
    assert len(found["none"].generate_until(request)) == 1


@pytest.mark.parametrize("system", [None, "ab cd"])
@pytest.mark.parametrize("turns", [True, False])
def test_tasks_as_chats(directory, judge, system, turns, tmp_path):
    """Choices and generated text with two examples, through the command."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    draw = random.Random(3)
    rows = [{"q": text(draw, 6) + "ab", "c": ["ab", "ba", "cda ab"], "a": draw.randrange(3)} for _ in range(12)]
    few = "fewshot_split: test\nfewshot_config: {sampler: first_n}\n"
    write_tasks(tmp_path, rows, '{until: ["c"], max_gen_toks: 9}', "[{metric: exact_match}, {metric: chrf}]", few)
    chat = dict(apply_chat_template=True, fewshot_as_multiturn=turns, system_instruction=system, num_fewshot=2)
    manager = TaskManager(include_path=str(tmp_path))
    expected = simple_evaluate(
        model=judge, tasks=["choices", "texts"], task_manager=manager, log_samples=False, **chat
    )["results"]
    out = tmp_path / "out.json"
    words = [
        "--init-from",
        directory,
        "--include-path",
        tmp_path,
        "--out",
        out,
        "--apply-chat-template",
        "--num-fewshot",
        2,
    ]
    words += ["--fewshot-as-multiturn" if turns else "--no-fewshot-as-multiturn", "--devices", "cpu:1"]
    words += ["--system-instruction", system] if system else []
    assert main([str(word) for word in ("--harness", "choices,texts", *words)]) == 0
    found = json.loads(out.read_text())["tasks"]
    for name in ("choices", "texts"):
        for metric, value in found[name].items():
            assert value == pytest.approx(expected[name][metric], abs=1e-6), (name, metric)

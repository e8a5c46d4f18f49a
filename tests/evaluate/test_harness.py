"""lm-evaluation-harness: the same requests through its `hf` model (transformers) and through ours.

pip install "megajax[judges,eval]" && pytest -m slow tests/evaluate/test_harness.py
"""

import json
import pathlib
import shutil
import sys

import pytest

from megajax.config import ParallelConfig
from megajax.evaluate.__main__ import main
from megajax.evaluate.scorer import evaluation_run, make_scorer
from megajax.interop.weight_source import HuggingFaceSource
from megajax.runtime.mesh import make_mesh
from tests.interop.hugging_face import golden

LAYOUTS = {
    "one device": {},
    "pipe 2 x tensor 2": dict(pipe=2, tensor=2),
    "data 2 x context 2, ZeRO-3": dict(data=2, context=2, zero=3),
}
CONTEXT = 128
START = "<|endoftext|>"
POST_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": START, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {START: {"id": START, "ids": [0], "tokens": [START]}},
}


def words(first: int, count: int) -> str:
    """Words of the golden tokenizer."""
    return " ".join(f"w{(7 * first + 13 * place * place + place) % 62}" for place in range(count))


# (context, continuation)
PAIRS = [
    (words(1, 5), " " + words(2, 3)),
    (words(3, 40) + " ", words(4, 1)),  # the space at the end moves to the continuation
    ("", words(5, 4)),
    (words(6, 150), " " + words(7, 6)),  # longer than the model's context
    (words(8, 1), " " + words(9, 100)),
    *((words(count, count), f" w{choice}") for count in (3, 17) for choice in range(12)),
]
DOCUMENTS = [words(1, 9), words(2, 127), words(3, 128), words(4, 300), ""]
GENERATIONS = [
    (words(1, 5), {"until": ["w1 "], "max_gen_toks": 20}),
    (words(2, 9), {"until": ["w1 "], "max_gen_toks": 20}),
    (words(3, 30), {"until": [], "max_gen_toks": 40, "do_sample": False, "temperature": 0.0}),
    (words(4, 200), {"until": ["zz"], "max_gen_toks": 8}),
    (words(5, 12), {"until": [" w3", " w4", " w5", " w6"], "max_gen_toks": 40}),
]


@pytest.fixture(scope="module", params=["no start token", "a start token"])
def directory(request, tmp_path_factory) -> pathlib.Path:
    """The golden llama, with a tokenizer that puts a token in front of each text, or does not."""
    for library in ("lm_eval", "torch", "transformers"):
        pytest.importorskip(library)
    found = pathlib.Path(shutil.copytree(golden("llama"), tmp_path_factory.mktemp("model") / "llama"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": START,
        "unk_token": "[UNK]",
        "pad_token": START,
    }
    if request.param == "a start token":
        tokenizer = json.loads((found / "tokenizer.json").read_text()) | {"post_processor": POST_PROCESSOR}
        (found / "tokenizer.json").write_text(json.dumps(tokenizer))
        settings["bos_token"] = START
    (found / "tokenizer_config.json").write_text(json.dumps(settings))
    return found


@pytest.fixture(scope="module")
def judge(directory):
    """lm-eval's model of type hf."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=4)


def write_tasks(folder: pathlib.Path, rows: list[dict], generation: str, metrics: str, more: str = "") -> None:
    """Tasks in YAML, choices and texts, with rows of a question "q", choices "c" and an answer "a"; `more`: of both."""
    folder.mkdir(exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n{more}"
    common += 'doc_to_text: "{{q}}"\n'
    (folder / "choices.yaml").write_text(
        'task: choices\noutput_type: multiple_choice\ndoc_to_choice: "{{c}}"\ndoc_to_target: a' + common
    )
    (folder / "texts.yaml").write_text(
        'task: texts\noutput_type: generate_until\ndoc_to_target: "{{c[0]}}"\n'
        f"generation_kwargs: {generation}\nmetric_list: {metrics}" + common
    )


def instances(kind: str, arguments: list) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in arguments]


@pytest.fixture(scope="module")
def wanted(judge) -> dict:
    """The judge's answers."""
    return {
        "loglikelihood": judge.loglikelihood(instances("loglikelihood", PAIRS)),
        "rolling": judge.loglikelihood_rolling(instances("loglikelihood_rolling", [(one,) for one in DOCUMENTS[:-1]])),
        "texts": judge.generate_until(instances("generate_until", GENERATIONS)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_answers_of_transformers(layout, directory, wanted):
    from megajax.evaluate.harness import HarnessModel

    source = HuggingFaceSource(str(directory))
    run = evaluation_run(source.run("fp32"), ParallelConfig(**LAYOUTS[layout]))
    run.validate()
    scorer = make_scorer(run, make_mesh(run.parallel), samples=4)
    model = HarnessModel(scorer, source.load(scorer), source.tokenizer, source.hugging_face)
    assert model.max_length == CONTEXT
    found = model.loglikelihood(instances("loglikelihood", PAIRS))
    greedy = [flag for _, flag in wanted["loglikelihood"]]
    assert [flag for _, flag in found] == greedy
    for (value, _), (expected, _) in zip(found, wanted["loglikelihood"], strict=True):
        assert value == pytest.approx(expected, abs=1e-4)
    rolling = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(one,) for one in DOCUMENTS]))
    # Relative too: lm-eval adds in fp32, in which numbers of the size of 600 are 6e-5 apart.
    assert rolling[:-1] == pytest.approx(wanted["rolling"], rel=1e-6, abs=1e-4) and len(rolling) == len(DOCUMENTS)
    before = model.truncated
    assert model.generate_until(instances("generate_until", GENERATIONS)) == wanted["texts"]
    assert model.truncated == before + 1 and before == 1
    assert any(
        0 < len(text.split()) < options["max_gen_toks"]
        for text, (_, options) in zip(wanted["texts"], GENERATIONS, strict=True)
    )


@pytest.mark.slow
def test_greedy_continuations_are_greedy(directory, judge):
    """Flags that are true: each context's own greedy text."""
    from megajax.evaluate.harness import HarnessModel

    contexts = [words(count, count) for count in (3, 8, 20)]
    texts = judge.generate_until(
        instances("generate_until", [(one, {"until": [], "max_gen_toks": 3}) for one in contexts])
    )
    pairs = [(one, " " + text) for one, text in zip(contexts, texts, strict=True)]
    expected = judge.loglikelihood(instances("loglikelihood", pairs))
    source = HuggingFaceSource(str(directory))
    scorer = make_scorer(evaluation_run(source.run("fp32"), ParallelConfig()), make_mesh(ParallelConfig()))
    found = HarnessModel(scorer, source.load(scorer), source.tokenizer).loglikelihood(instances("loglikelihood", pairs))
    assert [flag for _, flag in found] == [flag for _, flag in expected] == [True] * 3


@pytest.mark.slow
def test_the_command_runs_tasks_of_a_directory(directory, judge, tmp_path, capsys):
    """A task of multiple choices and one of generated text, from local files, with the judge's metrics."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    rows = [{"q": words(n, 4 + n), "c": [f"w{n}", f"w{n + 9}", f"w{n + 20}"], "a": n % 3} for n in range(20)]
    tasks = tmp_path / "tasks"
    write_tasks(tasks, rows, '{until: ["w9"], max_gen_toks: 5}', "[{metric: exact_match}]")
    broken = (tasks / "choices.yaml").read_text().replace("task: choices", "task: broken")
    (tasks / "broken.yaml").write_text(broken.replace("data.jsonl", "none.jsonl"))
    manager = TaskManager(include_path=str(tasks))
    expected = simple_evaluate(model=judge, tasks=["choices", "texts"], task_manager=manager, log_samples=False)[
        "results"
    ]
    out = tmp_path / "out.json"
    model = [
        "--init-from",
        str(directory),
        "--include-path",
        str(tasks),
        "--out",
        str(out),
        "--devices",
        "cpu:2",
        "--pipe",
        "2",
    ]
    capsys.readouterr()
    assert main(["--harness", "choices,texts", *model]) == 0
    found = json.loads(out.read_text())
    for name, metric in (("choices", "acc,none"), ("texts", "exact_match,none")):
        assert found["tasks"][name][metric] == pytest.approx(expected[name][metric])
    assert found["documents"] == {"choices": 20, "texts": 20} and found["settings"]["layout"]["pipe"] == 2
    for name, message in {
        "choises": "there is no task choises in",
        "broken": "the task broken cannot be loaded",
    }.items():
        capsys.readouterr()
        assert main(["--harness", name, *model]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and message in error


def test_without_the_library_or_with_options_of_the_other_kind_it_is_one_line(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("megajax.evaluate.harness")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    model = ["--init-from", str(golden("llama"))]
    cases = {
        (
            "--harness",
            "arc",
        ): "--harness needs lm-eval (import of lm_eval halted; None in sys.modules): run pip install",
        ("--harness", "arc", "--task", "lambada"): "--task is of the papers' tasks, and --harness has its own: omit it",
        ("--harness", "arc", "--stride", "3"): "--stride is of the papers' tasks",
        (
            "--task",
            "lambada",
            "--task-data",
            "x",
            "--limit",
            "3",
        ): "--limit is of --harness: pass --harness TASKS, or omit it",
        ("--limit", "0"): "--limit: 0 must be a whole number, 1 or more",
    }
    for words, message in cases.items():
        capsys.readouterr()
        assert main([*words, *model]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("error: ") and message in error, error

"""`python -m experiments.finetune_bert`: it learns, resumes exactly, reports the median of seeds, and names mistakes."""

import json
import re
import shutil
import signal

import numpy as np
import pytest

from experiments import finetune_bert
from megajax.checkpoint import layout, reader
from megajax.checkpoint.streamed import open_leaf
from megajax.evaluate import squad
from megajax.evaluate.classification import metrics
from megajax.train.sinks import read_steps
from tests.data.squad_files import question, write_squad
from tests.train.front_door import Command

SMALL = (
    "--layers 2 --hidden 64 --heads 4 --feedforward 128 --sequence-length 16 --global-batch-size 6 --microbatch-size 1 "
)
SMALL += "--dropout 0 --learning-rate 0.005 --beta2 0.98 --devices cpu:4"


@pytest.fixture
def files(tmp_path):
    """Samples whose class is whether the first sentence has the word "good"."""
    draw, paths = np.random.default_rng(0), {}
    for name, count in {"train": 60, "dev": 21}.items():
        labels = draw.integers(0, 2, count)
        nouns = draw.choice(["king", "queen", "day", "night"], count)
        rows = [
            {"sentence": f"a {('bad', 'good')[label]} {noun}", "label": int(label)}
            for label, noun in zip(labels, nouns, strict=True)
        ]
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text("\n".join(map(json.dumps, rows)))
    return ["--task", "sst2", "--task-data", str(paths["train"]), "--dev-data", str(paths["dev"])]


def records(path):
    return read_steps(path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--devices cpu:1", "--devices cpu:4 --pipe 2 --tensor 2"])
def test_it_learns_and_resumes_exactly(layout, files, tmp_path, capsys):
    """Two epochs; then the last checkpoint is lost, and the second epoch is run again."""
    run_dir = tmp_path / "run"
    words = [*SMALL.split(), *files, "--epochs", "2", "--run-dir", str(run_dir), *layout.split()]
    assert finetune_bert.main([*words, "--max-to-keep", "2"]) == 0
    out = capsys.readouterr().out
    assert "60 samples, 0 of them cut" in out and "epoch 2: dev accuracy" in out and "of 21 samples" in out
    log, best = records(run_dir / "log.jsonl"), json.loads((run_dir / "best.json").read_text())
    assert len(log) == 20 and log[19]["dev/accuracy"] > 0.9 and "dev/accuracy" in log[9]
    assert best["accuracy"] == max(log[9]["dev/accuracy"], log[19]["dev/accuracy"])
    shutil.rmtree(run_dir / "checkpoints/step_00000020")
    assert finetune_bert.main([*words, "--max-to-keep", "1", "--resume", "auto"]) == 0
    again = records(run_dir / "log.jsonl")[-10:]
    for one, other in zip(log[10:], again, strict=True):
        assert one["loss"] == other["loss"]
    assert log[19]["dev/loss"] == again[-1]["dev/loss"] and json.loads((run_dir / "best.json").read_text()) == best
    kept = {path.name for path in (run_dir / "checkpoints").glob("step_*")}
    assert kept == {f"step_{step:08}" for step in (best["step"], 20)}  # the newest, and the best


@pytest.fixture
def squad_files(tmp_path):
    """The answer is the word "good" and the noun after it; a third of the contexts have none."""
    draw, paths = np.random.default_rng(0), {}
    for name, count in {"train": 60, "dev": 21}.items():
        paragraphs = []
        for number in range(count):
            words, answers = draw.choice(["a", "day", "night", "bad"], draw.integers(6, 14)).tolist(), []
            if number % 3:
                place = int(draw.integers(0, len(words)))
                words[place] = f"good {draw.choice(['king', 'queen'])}"
                answers = [(words[place], sum(len(word) + 1 for word in words[:place]))]
            paragraphs.append((" ".join(words), [question(f"{name}{number}", "what", *answers)]))
        paths[name] = write_squad(tmp_path / f"{name}.json", paragraphs, "v2.0")
    return ["--task", "squad2", "--task-data", paths["train"], "--dev-data", paths["dev"]]


@pytest.mark.slow
def test_it_learns_spans(squad_files, tmp_path, capsys):
    """On context 2; predictions.json has the score of best.json."""
    run_dir = tmp_path / "run"
    words = [*SMALL.split(), *squad_files, "--doc-stride", "6", "--epochs", "4", "--run-dir", str(run_dir)]
    ring = ["--context-exchange", "ring"]
    assert finetune_bert.main([*words, "--pipe", "2", "--context", "2", "--schedule", "1f1b", *ring]) == 2
    assert "or --schedule interleaved_1f1b" in capsys.readouterr().err
    assert finetune_bert.main([*words, "--context", "2", "--devices", "cpu:2"]) == 0
    out = capsys.readouterr().out
    windows = int(re.search(r"60 questions in (\d+) windows of 16 tokens", out)[1])
    steps = -(-windows // 6)
    assert windows > 60 and "of 21 questions" in out
    log, best = records(run_dir / "log.jsonl"), json.loads((run_dir / "best.json").read_text())
    assert len(log) == 4 * steps and best["f1"] == max(log[epoch * steps - 1]["dev/f1"] for epoch in (1, 2, 3, 4)) > 90
    files = ["--data", squad_files[-1], "--predictions", str(run_dir / "predictions.json")]
    files += ["--no-answer", str(run_dir / "null_odds.json"), "--threshold", "0"]
    assert squad.main(files) == 0
    assert json.loads(capsys.readouterr().out)["f1"] == pytest.approx(best["f1"])


@pytest.fixture
def race_folders(tmp_path):
    """The right answer is "king", wherever it is among the four."""
    draw = np.random.default_rng(0)
    for name, count in {"train": 60, "dev": 13}.items():
        (tmp_path / name / "high").mkdir(parents=True)
        for number in range(count):
            words = draw.permutation(["king", "queen", "day", "night"]).tolist()
            item = {"article": "a good day", "questions": ["a _ ?"]}
            item |= {"options": [words], "answers": ["ABCD"[words.index("king")]]}
            (tmp_path / name / "high" / f"{number}.txt").write_text(json.dumps(item))
    return ["--task", "race", "--task-data", str(tmp_path / "train"), "--dev-data", str(tmp_path / "dev")]


@pytest.mark.slow
def test_it_learns_choices(race_folders, tmp_path, capsys):
    """On two replicas, a question in a microbatch of each."""
    run_dir = tmp_path / "run"
    words = [*SMALL.split(), *race_folders, "--epochs", "3", "--run-dir", str(run_dir), "--global-batch-size", "16"]
    words += ["--microbatch-size", "4", "--data", "2", "--devices", "cpu:2", "--learning-rate", "0.002"]
    assert finetune_bert.main(words) == 0
    out = capsys.readouterr().out
    assert "60 questions with 4 answers each: 240 samples, 0 of them with an article cut" in out
    assert "dev accuracy" in out and "of 13 questions" in out
    log, best = records(run_dir / "log.jsonl"), json.loads((run_dir / "best.json").read_text())
    assert len(log) == 45 and abs(log[0]["loss"] - np.log(4)) < 0.3 and best["accuracy"] > 0.9


def written(run_dir) -> dict:
    """What a run leaves behind: the last record of each step, best.json, and the arrays of its checkpoints."""
    steps = {one["step"]: one for one in records(run_dir / "log.jsonl")}
    found = {"best": json.loads((run_dir / "best.json").read_text())}
    for step, one in steps.items():
        found[step] = {name: one[name] for name in one if name in ("loss", "grad_norm") or name.startswith("dev/")}
    for path in sorted(run_dir.glob("checkpoints/step_*")):
        for name in layout.named(reader.arrays_in(path)):
            found[f"{path.name}/{name}"] = np.asarray(open_leaf(path, name).read().result()).tobytes()
    return found


@pytest.mark.slow
def test_runs_that_are_killed_resume_exactly(files, tmp_path):
    """Two seeds; kill -9 within an epoch of the first, within one of the second, and the same command each time."""
    words = [*SMALL.split(), *files, "--epochs", "8", "--dropout", "0.1", "--save-every", "5", "--seeds", "1,2"]
    words += ["--pipe", "2", "--devices", "cpu:2", "--microbatch-size", "3", "--resume", "auto", "--max-to-keep", "2"]
    start = lambda name: Command(  # noqa: E731
        tmp_path, ["experiments.finetune_bert", *words, "--run-dir", str(tmp_path / name.split("_")[0])], name
    )
    whole = start("whole")
    assert whole.wait(1200) == 0, whole.err
    for number, place in enumerate(("seed_1/checkpoints/step_00000005", "seed_2/checkpoints/step_00000025")):
        killed = start(f"killed_{number}")
        killed.until((tmp_path / "killed" / place).exists, 600)
        killed.process.kill()
        assert killed.wait() == -signal.SIGKILL, killed.err
    again = start("killed_last")
    assert again.wait(1200) == 0, again.err
    assert again.out.splitlines()[-3:] == whole.out.splitlines()[-3:]
    for seed in ("seed_1", "seed_2"):
        wanted, found = (written(tmp_path / name / seed) for name in ("whole", "killed"))
        assert wanted.keys() == found.keys() and {80, "dev/accuracy"} <= wanted.keys() | wanted[80].keys()
        for name, value in wanted.items():
            assert found[name] == value, (seed, name)


@pytest.mark.slow
def test_the_median_of_seeds(files, tmp_path, capsys):
    words = [*SMALL.split(), *files, "--epochs", "1", "--run-dir", str(tmp_path / "runs"), "--seeds", "1,2,3"]
    assert finetune_bert.main(words) == 0
    scores = [json.loads((tmp_path / f"runs/seed_{seed}/best.json").read_text())["accuracy"] for seed in (1, 2, 3)]
    assert f"median of 3 seeds: dev accuracy {sorted(scores)[1]:.4f}" in capsys.readouterr().out


def test_metrics_by_hand():
    """3 of 5 right; class 1 is predicted 3 times, is there 3 times, and twice both: F1 = 4 / 6."""
    predicted, classes = np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 1, 0])
    assert metrics(predicted, classes, f1=True) == {"accuracy": 0.6, "f1": pytest.approx(4 / 6)}
    assert metrics(predicted, classes, f1=False) == {"accuracy": 0.6}
    assert metrics(np.zeros(5, int), np.zeros(5, int), f1=True) == {"accuracy": 1.0, "f1": 0.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "",
            "there is nothing to fine-tune on: pass --task mnli|qqp|sst2|mrpc|rte|squad|squad2|race, --task-data FILE",
        ),
        ("--task cola --task-data a --dev-data b", "task"),
        ("--task sst2 --task-data missing.jsonl --dev-data b", "cannot read missing.jsonl"),
        ("FILES --seeds 1,2", "--seeds has nowhere to write its runs: pass --run-dir DIR too."),
        ("FILES --seeds one", "'one' are not seeds: pass --seeds 1,2,3"),
        ("--task squad --task-data missing.json --dev-data b", "cannot read missing.json"),
        ("SQUAD --task squad", "has no answer, which SQuAD 1.1 requires: pass --task squad2"),
        ("SQUAD --doc-stride 0", "--doc-stride"),
        (
            "SQUAD --output-heads none",
            "--task squad2 needs a BERT with its head: pass --output-heads spans --classes 2",
        ),
        ("RACE --microbatch-size 2", "microbatch_size = 2 is not a multiple of choices = 4, the samples of a question"),
        ("RACE --microbatch-size 4 --choices 3", "options[0] has 4 answers, and choices = 3"),
        ("FILES --save-every 5", "save_every = 5 does not divide the 2 steps of an epoch"),
        ("FILES --tokenizer byte", "tokenizer byte has no [CLS]"),
        (
            "FILES --evaluate-every 2 --evaluate-task ptb --evaluate-data x",
            "--evaluate-every is of models that write text",
        ),
    ],
)
def test_a_mistake_is_one_line(words, message, files, squad_files, race_folders, capsys):
    known = {"FILES": files, "SQUAD": squad_files, "RACE": race_folders}
    words = [word for part in words.split() for word in known.get(part, [part])]
    assert finetune_bert.main([*words, "--devices", "cpu:1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error

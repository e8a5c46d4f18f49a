"""--evaluate-every: the numbers of `python -m megajax.evaluate` for the checkpoint of the same step."""

import json
import math
import re

import pytest

from experiments import bert, gpt3
from megajax.evaluate.__main__ import main
from megajax.train.sinks import read_steps
from tests.evaluate.test_command import TEXT
from tests.generate.test_processes import codes
from tests.runtime.test_distributed import free_port
from tests.train.front_door import Run

MODEL = "--layers 4 --hidden 32 --heads 4 --kv-heads 2 --vocabulary 257 --sequence-length 64"
TRAIN = "--global-batch-size 8 --microbatch-size 1 --validation-batches 0 --new-tokens 0 --learning-rate 1e-2"
LAYOUTS = {
    "interleaved, ZeRO-3": "--data 2 --pipe 2 --tensor 1 --chunks 2 --zero 3 --devices cpu:4",
    "uneven, ZeRO-1": "--layers 5 --data 2 --pipe 2 --tensor 2 --chunks 1 --schedule 1f1b --zero 1 --recompute full",
    "zb_v": "--data 2 --pipe 2 --tensor 2 --schedule zb_v --chunks 2",
    "context": "--data 1 --context 2 --pipe 2 --tensor 2 --schedule eager_1f1b --chunks 1",
    "PipeDream-2BW": "--data 4 --pipe 2 --tensor 1 --schedule pipedream_2bw --chunks 1",
}
TASKS = {
    "wikitext103": ["--window", "48", "--stride", "8"],
    "lambada": [],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """The tasks' files."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "wikitext103").write_text(TEXT)
    lines = [" ".join(TEXT.split()[:count]) for count in (4, 9, 12, 20)]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return {name: str(path) for name, path in zip(TASKS, sorted(folder.iterdir(), reverse=True), strict=True)}


def evaluating(task: str, files: dict[str, str]) -> list[str]:
    """The options of a training."""
    words = ["--evaluate-every", "2", "--evaluate-task", task, "--evaluate-data", files[task], "--evaluate-batch", "2"]
    return [*words, *(word.replace("--", "--evaluate-") for word in TASKS[task])]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_of_the_checkpoint_of_that_step(layout, task, files, tmp_path, capfd):
    """After steps 2 and 3, the last one; the log has a line of it, and only these steps' records its values."""
    run_dir, out = tmp_path / "run", tmp_path / "out.json"
    words = [*MODEL.split(), *TRAIN.split(), "--devices", "cpu:8", *LAYOUTS[layout].split(), *evaluating(task, files)]
    words += ["--steps", "3", "--run-dir", str(run_dir), "--save-every", "2", "--log-every", "1"]
    assert gpt3.main(words) == 0
    text = capfd.readouterr().out
    rows = {row["step"]: row for row in read_steps(run_dir / "log.jsonl")}
    assert [step for step in rows if any("/" in name for name in rows[step])] == [2, 3]
    for step in (2, 3):
        words = [
            "--task",
            task,
            "--task-data",
            files[task],
            "--run-dir",
            str(run_dir),
            "--step",
            str(step),
            *TASKS[task],
        ]
        assert main([*words, "--devices", "cpu:1", "--batch", "2", "--out", str(out)]) == 0
        expected = json.loads(out.read_text())
        found = {name.rpartition("/")[2]: value for name, value in rows[step].items() if name.startswith("evaluation/")}
        assert set(found) == expected.keys() - {"counts", "settings", "seconds"}
        for name, value in found.items():
            of_loss = math.log if "perplexity" in name else float
            assert of_loss(value) == pytest.approx(of_loss(expected[name]), rel=1e-6), name
        [line] = re.findall(rf"^step {step}: {task}: (.*)$", text, re.MULTILINE)
        assert f"perplexity {found['perplexity']:.6g}" in line
    assert rows[2][f"evaluation/{task}/loss"] != rows[3][f"evaluation/{task}/loss"]
    account = json.loads((run_dir / "goodput.jsonl").read_text().splitlines()[-1])
    assert account["seconds"]["validation"] > 0


MISTAKES = {
    "--evaluate-every 5": "--evaluate-every needs --evaluate-task and --evaluate-data too",
    "--evaluate-stride 5": "--evaluate-stride needs --evaluate-every and --evaluate-task and --evaluate-data too",
    "--evaluate-every 5 --evaluate-task lambda --evaluate-data {text}": "evaluate_task = 'lambda' is not known .did you",
    "--evaluate-every 5 --evaluate-task ptb --evaluate-data none": "cannot read .*none: No such file.*--evaluate-data",
    "--evaluate-every 5 --evaluate-task ptb --evaluate-data {text} --evaluate-window 65": "--evaluate-window 65 is longer "
    "than the model's context: pass at most --evaluate-window 64",
    "--evaluate-every 5 --evaluate-task lambada --evaluate-data {text} --evaluate-stride 5": "is of overlapping windows",
    "--evaluate-every 0 --evaluate-task lambada --evaluate-data {text}": "evaluate_every = 0 must be",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_line_before_the_training(words, files, capfd):
    model = [*MODEL.split(), *TRAIN.split(), "--devices", "cpu:8", "--steps", "1"]
    assert gpt3.main([*model, *words.format(text=files["wikitext103"]).split()]) == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert re.search(MISTAKES[words], line), line


def test_an_experiment_without_a_task_refuses_the_option(files, capfd):
    assert bert.main(evaluating("lambada", files)) == 2
    assert "--evaluate-every is not an option of this experiment" in capfd.readouterr().err


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one(files, tmp_path):
    words = f"{MODEL} {TRAIN} --data 2 --pipe 2 --tensor 2 --zero 3 --steps 2 --log-every 1 "
    words += " ".join(evaluating("wikitext103", files))
    alone = Run(tmp_path, f"{words} --devices cpu:8", name="alone")
    assert alone.wait() == 0, alone.err
    flags = f"--devices cpu:4 --coordinator 127.0.0.1:{free_port()} --processes 2 --process-id"
    found = [Run(tmp_path, f"{words} {flags} {number}", name=f"process_{number}") for number in range(2)]
    assert codes(found) == [0, 0], [run.err for run in found]
    lines = [re.findall(r"^step 2: wikitext103: .*$", run.out, re.MULTILINE) for run in (alone, found[0])]
    assert len(lines[0]) == 1 and lines[0] == lines[1] and found[1].out == ""

"""Evaluation by several processes: the results of one process, files of process 0, and ends of all together."""

import json
import re

import pytest

from megajax.config import ConfigError
from megajax.evaluate.__main__ import main, run_connected
from megajax.evaluate.options import read_options
from megajax.evaluate.results import fingerprint
from tests.evaluate.test_command import TEXT, run_dir, same  # noqa: F401 (run_dir is a fixture)
from tests.generate.test_processes import codes
from tests.interop.hugging_face import golden
from tests.runtime.test_distributed import free_port
from tests.train.front_door import Command

TINY = ["--init-from", golden("llama"), "--task", "ptb", "--window", 16, "--stride", 8, "--batch", 2]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file for the tokenizer of the small Llama, whose words are w0, w1, ..."""
    path = tmp_path_factory.mktemp("data") / "ptb.test.txt"
    path.write_text(" ".join(f"w{number * number % 61}" for number in range(90)))
    return path


def start(path, words, own=((), ())) -> list[Command]:
    """Two processes with the same words, and words of their own."""
    both = ["megajax.evaluate", *map(str, words), "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2"]
    return [
        Command(path, [*both, "--process-id", str(number), *map(str, own[number])], f"process_{number}")
        for number in range(2)
    ]


@pytest.mark.slow
def test_two_processes_have_the_results_of_one(text, tmp_path):
    """Process 0 alone writes; the results of one device are equal up to rounding."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    words = [*TINY, "--task-data", text]
    assert main([*map(str, words), "--out", str(one), "--devices", "cpu:1"]) == 0
    own = ("--out", two), ("--out", tmp_path / "none" / "none")
    found = start(tmp_path, [*words, "--tensor", 2, "--devices", "cpu:1"], own)
    assert codes(found) == [0, 0], [command.err for command in found]
    expected, results = json.loads(one.read_text()), json.loads(two.read_text())
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-6) and results["counts"] == expected["counts"]
    assert "ptb: adjusted_perplexity" in found[0].out and (found[1].out, found[1].err) == ("", "")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--pipe 2 --tensor 2", "--data 2 --pipe 2 --zero 3", "--context 2 --data 2"])
def test_a_run_with_pipelines_and_resumed_in_two_processes(layout, run_dir, tmp_path):  # noqa: F811
    """The scores of the first batches are in the file that process 0 has; the others learn which batches are left."""
    data, out = tmp_path / "wiki.test.tokens", tmp_path / "out.json"
    data.write_text(TEXT)
    words = [
        "--task",
        "wikitext103",
        "--task-data",
        data,
        "--run-dir",
        run_dir,
        "--window",
        16,
        "--stride",
        2,
        "--batch",
        1,
    ]
    assert main([*map(str, words), *layout.split(), "--devices", "cpu:4", "--out", str(tmp_path / "one.json")]) == 0
    expected = json.loads((tmp_path / "one.json").read_text())
    words += [*layout.split(), "--devices", "cpu:2"]
    first = start(tmp_path, words, (("--out", out), ()))
    assert codes(first) == [0, 0], [command.err for command in first]
    results = json.loads(out.read_text())
    assert same(results, expected)
    header = {"fingerprint": fingerprint(results["settings"]), "settings": results["settings"]}
    kept = {"scores": [[number, 1e4, 0] for number in range(16)]}
    (tmp_path / "out.json.partial").write_text(f"{json.dumps(header)}\n{json.dumps(kept)}\n")
    again = start(tmp_path, words, (("--out", out), ()))
    assert codes(again) == [0, 0], [command.err for command in again]
    assert "resumed: 16 of 44 samples" in again[0].err and json.loads(out.read_text())["loss"] > results["loss"]


MISTAKES = {
    "other data": "the data sha256 is .* in process 1, and .* in process 0: run the same command",
    "another stride": "--stride is 4 in process 1, and 8 in process 0: run the same command",
    "no data": "cannot read .*none: No such file",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_process_ends_both_with_one_line(name, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + " w1")
    data = {"other data": other, "no data": tmp_path / "none"}.get(name, text)
    own = ("--task-data", text), ("--task-data", data, *(("--stride", 4) if name == "another stride" else ()))
    found = start(tmp_path, [*TINY, "--tensor", 2, "--devices", "cpu:1"], own)
    assert codes(found) == [2, 2], [command.err for command in found]
    for command in found:
        assert re.search(MISTAKES[name], command.err), command.err
        assert command.err.startswith("error: ") and command.err.count("\n") == 0


def test_the_harness_runs_in_one_process():
    with pytest.raises(ConfigError, match="--harness runs in one process, and there are 2: start one"):
        run_connected(read_options(["--init-from", "x", "--harness", "a"]), 2)


def test_options_of_the_processes():
    words = [
        "--init-from",
        "x",
        "--task",
        "ptb",
        "--task-data",
        "a",
        "--coordinator",
        "node0:1",
        "--processes",
        "2",
        "--process-id",
    ]
    first, second = (read_options([*words, number, "--out", number]) for number in "01")
    assert (first.launch.process_id, second.launch.processes) == (0, 2)
    assert first.of_all_processes == second.of_all_processes and first.of_all_processes["--batch"] == "8"
    with pytest.raises(ConfigError, match="need --processes, --process-id too"):
        read_options(["--init-from", "x", "--task", "ptb", "--task-data", "a", "--coordinator", "node0:1"])

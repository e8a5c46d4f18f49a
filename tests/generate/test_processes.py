"""Generation by several processes: the texts of one process, process 0's prompts and terminal, and ends of all together."""

import json
import re
import signal
import types

import pytest

from megajax.config import ConfigError
from megajax.generate.__main__ import main
from megajax.generate.options import read_options
from megajax.runtime import exchange, mesh
from tests.interop.hugging_face import convert, golden
from tests.runtime.test_distributed import MESH, free_port
from tests.train.front_door import Command, Run

LONG = {"prompt": "w9 " * 20 + "w1", "id": 1}
ROWS = [{"prompt": "w1 w5 w7"}, LONG, {"prompt": "w3", "id": "\u00e9"}, {"prompt": "w60 w8"}, {"prompt": "w2 w4"}]
DRAWS = ["--new-tokens", "40", "--seed", "3", "--stop", "w7 w", "--batch", "2", "--prefill-chunk", "8"]
TINY = ["--init-from", str(golden("llama")), "--new-tokens", "6", "--temperature", "0"]


def start(path, words, *, own=((), ()), typed=(None, None)) -> list[Command]:
    """Two processes with the same words, and words and typed lines of their own."""
    both = ["megajax.generate", *map(str, words), "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2"]
    return [
        Command(path, [*both, "--process-id", str(number), *map(str, own[number])], f"process_{number}", typed[number])
        for number in range(2)
    ]


def codes(found) -> list[int]:
    return [command.wait() for command in found]


def imported(path, source) -> str:
    """A run directory with weights of Hugging Face or GGUF."""
    words = ("--sequence-length", 64, "--tokenizer", golden("llama") / "tokenizer.json")
    assert convert("import", source, "--run-dir", path / "run", *words) == 0
    return str(path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--data", 2, "--pipe", 2), ("--tensor", 2)], ids=["data 2 x pipe 2", "tensor 2"])
@pytest.mark.parametrize("source", ["hf", "run-dir", "gguf"])
def test_the_texts_of_two_processes_are_those_of_one(tmp_path, source, layout):
    """Only process 0 has the prompts; it alone writes. Three batches, of prompts that end at different tokens."""
    model = ["--init-from", golden("llama")]
    if source == "gguf":
        pytest.importorskip("gguf")
    if source != "hf":
        model = ["--run-dir", imported(tmp_path, golden("llama") if source == "run-dir" else golden("llama.gguf"))]
    prompts, one, two = (tmp_path / name for name in ("prompts.jsonl", "one.jsonl", "two.jsonl"))
    prompts.write_text("\n".join(map(json.dumps, ROWS)))
    words = [*model, *DRAWS]
    assert main([*map(str, words), "--prompts", str(prompts), "--out", str(one), "--devices", "cpu:1"]) == 0
    own = ("--prompts", prompts, "--out", two), ("--prompts", tmp_path / "none", "--out", tmp_path / "none")
    devices = "cpu:2" if "--data" in layout else "cpu:1"
    found = start(tmp_path, [*words, *layout, "--devices", devices], own=own)
    assert codes(found) == [0, 0], [command.err for command in found]
    assert two.read_text() == one.read_text()
    texts = [json.loads(line) for line in one.read_text().splitlines()]
    assert [{name: row[name] for name in given} for row, given in zip(texts, ROWS, strict=True)] == ROWS
    assert len({row["tokens"] for row in texts}) > 1  # they end at different blocks of tokens
    assert "tokens/s" in found[0].err and (found[0].out, found[1].out, found[1].err) == ("", "", "")
    assert not list(tmp_path.glob("none*"))


@pytest.mark.slow
def test_the_text_after_a_training_of_two_processes_is_that_of_one(tmp_path):
    """data 2 x pipe 2 x tensor 2, with interleaved chunks and ZeRO."""
    words = f"{MESH} --steps 2 --zero 1 --new-tokens 8 --temperature 0"
    alone = Run(tmp_path, f"{words} --devices cpu:8", name="alone")
    assert alone.wait() == 0, alone.err
    flags = f"--devices cpu:4 --coordinator 127.0.0.1:{free_port()} --processes 2 --process-id"
    found = [Run(tmp_path, f"{words} {flags} {number}", name=f"process_{number}") for number in range(2)]
    assert codes(found) == [0, 0], [run.err for run in found]
    sample = alone.out.partition("a sample, continuing 'The ':")[2]
    assert sample.startswith("\nThe ") and found[0].out.endswith(sample) and found[1].out == ""


@pytest.mark.slow
def test_lines_typed_at_process_0_are_continued_by_both(tmp_path, capsys, monkeypatch):
    lines = "w1 w5 w7\n\nw3\n"
    monkeypatch.setattr(
        "sys.stdin", types.SimpleNamespace(isatty=lambda: False, readline=iter([*lines.splitlines(True), ""]).__next__)
    )
    assert main([*TINY, "--interactive", "--devices", "cpu:1"]) == 0
    alone = capsys.readouterr().out
    found = start(tmp_path, [*TINY, "--interactive", "--tensor", 2, "--devices", "cpu:1"], typed=(lines, "w9\n"))
    assert codes(found) == [0, 0], [command.err for command in found]
    shown = re.sub(r"\[Gloo\] .* is : \d+\n", "", found[0].files[0].read_text())  # anywhere, in a line too
    assert shown == alone and alone.count("w1 w5 w7") == 1
    assert "error: the line: the prompt is empty" in found[0].err and found[0].err.count("[length; prefill") == 2
    assert (found[1].out, found[1].err) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_to_one_process_ends_both(tmp_path, victim):
    """While they wait for a line to be typed."""
    found = start(tmp_path, [*TINY, "--interactive", "--tensor", 2, "--devices", "cpu:1"])
    found[0].until(lambda: "compiled in" in found[0].err)
    found[victim].process.send_signal(signal.SIGINT)
    ended = codes(found)
    assert (ended[victim], ended[1 - victim]) == (130, 3), [command.err for command in found]
    assert found[victim].err.splitlines()[-1] == "error: stopped by Ctrl-C"
    assert "stopped by Ctrl-C" in found[1 - victim].err.splitlines()[-1]
    assert not any("Traceback" in command.err for command in found)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other(tmp_path, victim):
    words = [*TINY, "--interactive", "--tensor", 2, "--devices", "cpu:1", "--peer-timeout", 10]
    found = start(tmp_path, words)
    found[0].until(lambda: "compiled in" in found[0].err)
    found[victim].process.kill()
    other = found[1 - victim]
    assert other.wait(60) == 3 and "Traceback" not in other.err
    assert f"error: process {victim} " in other.err.splitlines()[-1]


MISTAKES = {
    "a directory that process 1 does not have": (
        ((), ("--init-from", "nowhere")),
        "there is no directory nowhere: give one of a Hugging Face model",
    ),
    "an option that differs": (
        ((), ("--seed", "4")),
        "--seed is 4 in process 1, and 0 in process 0: run the same command",
    ),
    "prompts that process 0 does not have": (
        (("--prompts", "none.jsonl"), ("--prompts", "b.jsonl")),
        "cannot read none.jsonl",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_process_ends_both_with_one_line(tmp_path, name):
    own, message = MISTAKES[name]
    common = [*TINY, "--tensor", 2, "--devices", "cpu:1"] + ([] if "--prompts" in own[0] else ["--prompt", "w1"])
    found = start(tmp_path, common, own=own)
    assert codes(found) == [2, 2], [command.err for command in found]
    for command in found:
        assert message in command.err and command.err.startswith("error: ") and command.err.count("\n") == 0


class Service:
    """jax's coordination service, as two processes see it that run one after the other."""

    def __init__(self, values, process_id):
        self.values, self.process_id, self.num_processes, self.client = values, process_id, 2, self
        self.waits = 0

    def key_value_set(self, key, value):
        self.values[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        self.waits += 1
        if self.waits == 1:  # the first time nobody has typed anything yet
            raise RuntimeError(f"DEADLINE_EXCEEDED: {key} after {milliseconds} ms")
        return self.values[key]


@pytest.fixture
def processes(monkeypatch):
    """A function that makes this process one of two."""
    values = {}

    def become(process_id):
        service = Service(values, process_id)
        for module in (exchange, mesh):
            monkeypatch.setattr(module, "coordination_service", lambda: service)
        return service

    return become


def test_all_processes_have_process_0s_text(processes):
    processes(0)
    assert exchange.broadcast("a line", lambda: "typed") == "typed"
    service = processes(1)
    assert (
        exchange.broadcast("a line", lambda: pytest.fail("process 1 reads nothing")) == "typed" and service.waits == 2
    )
    with pytest.raises(KeyError):  # any other error than that of the wait
        exchange.broadcast("another line", str)


def test_a_value_that_differs_from_process_0s_is_named(processes):
    processes(0)
    exchange.require_same("options", {"--seed": "3", "--top-k": "None"})
    processes(1)
    exchange.require_same("options", {"--seed": "3", "--top-k": "None"})
    with pytest.raises(ConfigError, match="--top-k is 5 in process 1, and None in process 0: run the same command in"):
        exchange.require_same("options", {"--seed": "3", "--top-k": "5"})


def test_each_process_gives_an_equal_share_of_the_mesh(processes, monkeypatch):
    processes(1)
    devices = [types.SimpleNamespace(process_index=index // 4, id=index) for index in range(8)]
    monkeypatch.setattr(mesh, "start_devices", lambda spec, count: devices)
    chosen = lambda count: [device.id for device in mesh.choose_devices(None, count)]  # noqa: E731
    assert chosen(8) == [*range(8)] and chosen(4) == [0, 1, 4, 5] and chosen(2) == [0, 4]
    with pytest.raises(ConfigError, match="tensor = 3 devices, which 2 processes cannot share equally: pass --data"):
        chosen(3)
    devices.pop(0)
    with pytest.raises(ConfigError, match="= 8 devices, but there are 7"):
        chosen(8)
    devices[:] = [
        *devices[2:],
        types.SimpleNamespace(process_index=1, id=8),
        types.SimpleNamespace(process_index=1, id=9),
    ]
    with pytest.raises(ConfigError, match="process 0 has 1 devices, but each of the 2 gives 2"):
        chosen(4)


def test_options_of_the_processes():
    words = ["--init-from", "x", "--prompt", "a", "--coordinator", "node0:1", "--processes", "2", "--process-id"]
    words = ["--top-p", "0.5", *words]
    first, second = (read_options([*words, number, "--out", number, "--devices", "cpu"]) for number in "01")
    assert (first.launch.process_id, second.launch.processes) == (0, 2)
    assert first.of_all_processes == second.of_all_processes and first.of_all_processes["--top-p"] == "0.5"
    with pytest.raises(ConfigError, match="need --processes, --process-id too"):
        read_options(["--init-from", "x", "--prompt", "a", "--coordinator", "node0:1"])

"""preprocess --shard, and merge --shards: the pair of one process, restartable, with counts that are checked."""

import gzip
import json
import os
import pathlib
import re
import sys
import types

import fsspec
import pytest

from megajax.data import preprocess, shards
from megajax.data.preprocess import main
from megajax.data.spans import place_of_part

FILES = 7


@pytest.fixture
def folder(tmp_path, monkeypatch, tokenized_here):
    """Files of 1 to 7 documents in the working directory, and preprocessing without processes of its own."""
    monkeypatch.chdir(tmp_path)
    for number in range(FILES):
        rows = [{"text": f"text {number} {row}" * 9, "title": str(row)} for row in range(number + 1)]
        pathlib.Path(f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "bad\n")
    return tmp_path


def run(*words: str, out: str = "part", keys: str = "text title") -> int:
    common = f"--input [0-9].jsonl --out {out} --tokenizer byte --keys {keys}"
    return main([*common.split(), *words])


def merged(*words: str) -> int:
    return main(["merge", "--shards", "part", *words])


def refused(capsys, code: int) -> str:
    out, error = capsys.readouterr()
    assert code == 2 and error.count("\n") == 1 and error.startswith("error: "), (out, error)
    return error.removeprefix("error: ")


def pair(name: str) -> list[bytes]:
    return [pathlib.Path(f"{name}.{end}").read_bytes() for end in ("bin", "idx", "sums.json")]


@pytest.mark.parametrize("count", [3, FILES])
def test_merged_shards_are_the_pair_of_one_process(folder, capsys, count):
    assert run(out="whole") == 0
    for index in reversed(range(count)):
        assert run("--shard", f"{index}/{count}") == 0
    capsys.readouterr()
    assert merged() == 0
    assert capsys.readouterr().out == (
        "part_text: 28 documents, 2,044 tokens of uint16\npart_title: 28 documents, 56 tokens of uint16\n"
        f"{count} shards of 7 sources, 0.0 MB of text; 7 bad lines skipped\n"
    )
    assert [pair(f"part_{key}") for key in ("text", "title")] == [pair(f"whole_{key}") for key in ("text", "title")]


def test_large_files_of_lines_are_divided(folder, capsys, monkeypatch):
    """With files that are not, a URL, and more shards than sources; bad lines have a byte and a line."""
    monkeypatch.setattr(shards, "DIVIDED", 200)
    rows = [json.dumps({"text": f"row {row} " * (row % 7), "title": "é"}) for row in range(40)]
    rows[30] = "bad"
    content = "\n".join(rows).encode()
    pathlib.Path("4.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    with gzip.open("2.jsonl", "wb") as file:
        file.write(content)
    fsspec.filesystem("memory").pipe_file("shards/7.jsonl", content)
    words = "--input", *[f"{number}.jsonl" for number in range(FILES)], "memory://shards/7.jsonl", "--bad-lines", "skip"
    assert run(*words, out="whole") == 0
    names = set()
    capsys.readouterr()
    for index in range(20):
        assert run(*words, "--shard", f"{index}/20") == 0
        names |= set(
            re.findall(r"4.jsonl, from byte [\d,]+ line \d+: not JSON", " ".join(capsys.readouterr().err.split()))
        )
    assert len(names) == 1
    [(byte, line)] = re.findall(r"byte ([\d,]+) line (\d+)", names.pop())
    assert pathlib.Path("4.jsonl").read_bytes()[int(byte.replace(",", "")) :].split(b"\n")[int(line) - 1] == b"bad"
    assert merged() == 0
    assert "20 shards of 8 sources, 0.0 MB of text; 8 bad lines skipped" in capsys.readouterr().out
    assert [pair(f"part_{key}") for key in ("text", "title")] == [pair(f"whole_{key}") for key in ("text", "title")]
    broken("part.00005-of-00020.shard.json", lambda record: record.update(end_byte=record["end_byte"] + 1))
    assert "does not begin where the shard before it ends" in refused(capsys, merged("--overwrite"))


def divided(sizes, index, count):
    """(first, end) of the whole sources of a shard."""
    return tuple(place_of_part(part, count, [], sizes).source for part in (index, index + 1))


def test_shares_are_neighbouring_sources_of_about_the_same_bytes():
    for sizes in ([1] * 10, [5, 0, 0, 90, 1, 1, 1, 1, 1], [0, 0, 0], list(range(100))):
        for count in (1, 2, 3, 7):
            found = [divided(sizes, index, count) for index in range(count)]
            assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == len(sizes)
            largest = max(sum(sizes[first:end]) for first, end in found)
            assert largest <= sum(sizes) / count + max(sizes)


def test_a_complete_shard_is_not_made_again_and_half_of_one_is(folder, capsys, monkeypatch):
    assert run("--shard", "1/2") == 0
    before = os.stat("part_text.00001-of-00002.bin").st_mtime_ns
    capsys.readouterr()
    assert run("--shard", "1/2") == 0
    assert capsys.readouterr().out == "shard 1 of 2 is complete: 975 tokens; nothing was done\n"
    assert os.stat("part_text.00001-of-00002.bin").st_mtime_ns == before

    with monkeypatch.context() as patch:  # stopped before the record is written
        patch.setattr(shards.Shard, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run("--shard", "0/2")
    assert pathlib.Path("part_text.00000-of-00002.bin").exists()
    capsys.readouterr()
    assert "shard 0 of 2 is not complete: run the same command with --shard 0/2" in refused(capsys, merged())
    assert run("--shard", "0/2") == 0
    os.remove("part_title.00001-of-00002.idx")
    assert run("--shard", "1/2") == 0  # a file of it is gone
    assert merged() == 0

    pathlib.Path("0.jsonl").write_text("")  # a shard may have no document
    assert run("--shard", "0/7", out="other") == 0


def test_a_document_that_is_too_long_is_a_bad_line(folder, capsys):
    """Its bytes are not held."""
    long, short = json.dumps({"text": "long " * 500_000}), json.dumps({"text": "short"})
    for name, text, words, bad, tokens in (
        ("a.jsonl", f"{short}\n{long}\n{short}\n{long}\n{short}", (), [2, 4], 18),
        ("a.jsonl", f"{long}\n{short}\n{long}", (), [1, 3], 6),
        ("a.txt", f"ab\n{'long ' * 500_000}\nab\n", ("--text-documents", "line"), [2], 6),
        ("a.txt", f"ab\n\n{'long' * 500_000}\nx\n\nab\n", ("--text-documents", "paragraph"), [3], 6),
        ("a.txt", "long " * 500_000, (), [1], None),
        ("a.txt", "\nlong " * 100_000, (), [], 600_001),
    ):
        pathlib.Path(name).write_text(text)
        common = f"--input {name} --out long --tokenizer byte --overwrite --longest-document 1"
        code = main([*common.split(), *words])
        out, error = capsys.readouterr()
        assert code == (2 if tokens is None else 0), error
        joined = " ".join(error.split())
        assert [line for line in range(9) if f"{name}, line {line}: a " in joined] == bad, joined
        assert joined.count("longer than") == len(bad)
        assert tokens is None or f" {tokens:,} tokens" in out


class FakeRay:
    """A Ray whose tasks run at once, in this process; `failing`: of the shard whose host is lost."""

    def __init__(self, failing: int = -1):
        self.failing, self.settings = failing, {}

    def init(self, **settings):
        pass

    def remote(self, **settings):
        self.settings = settings
        return lambda function: types.SimpleNamespace(remote=lambda *words: lambda: function(*words))

    def get(self, task):
        self.failing -= 1
        if self.failing == -1:
            raise RuntimeError("the host is lost")
        return task()

    def shutdown(self):
        pass


def test_shards_are_tasks_of_ray(folder, capsys, monkeypatch):
    def run_here(command, **_):
        capsys.readouterr()
        code = main(command[3:])
        return types.SimpleNamespace(
            returncode=code, **dict(zip(("stdout", "stderr"), capsys.readouterr(), strict=True))
        )

    monkeypatch.setattr("megajax.data.ray_shards.subprocess.run", run_here)
    ray = FakeRay(failing=1)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert run("--ray", "3", "--workers", "5") == 2
    assert ray.settings["num_cpus"] == 5
    assert "error: shard 1 of 3: the host is lost; the same command makes only these again" in capsys.readouterr().err
    assert run("--ray=3", "--workers", "5") == 0
    assert capsys.readouterr().out == "shard 2 of 3 is complete: 525 tokens; nothing was done\n"  # the last one's lines
    assert run(out="whole") == 0 and merged() == 0
    assert [pair(f"part_{key}") for key in ("text", "title")] == [pair(f"whole_{key}") for key in ("text", "title")]
    monkeypatch.setitem(sys.modules, "ray", None)
    capsys.readouterr()
    assert "--ray needs the library ray" in refused(capsys, run("--ray", "3"))


@pytest.mark.slow
def test_a_real_ray(folder, monkeypatch):
    ray = pytest.importorskip("ray")
    start = ray.init
    monkeypatch.setattr(ray, "init", lambda **words: start(num_cpus=1, object_store_memory=80_000_000, **words))
    assert run("--ray", "2", "--workers", "1") == 0
    assert run(out="whole") == 0 and merged() == 0
    assert [pair(f"part_{key}") for key in ("text", "title")] == [pair(f"whole_{key}") for key in ("text", "title")]


WRONG = {
    "--shard 3": "--shard: '3' must be INDEX/COUNT, such as 0/64 to 63/64",
    "--shard 3/3": "3 shards have the numbers 0 to 2",
    "--shard -1/3": "--shard",
    "--shard 0/0": "must be INDEX/COUNT",
    "--shard 1/100000": "must be INDEX/COUNT",
    "--shard a/b": "must be INDEX/COUNT",
    "--shard 0/8": "--input has 7 sources, and a shard has whole ones: pass at most 7 shards",
    "--shard 0/2 --input 0.jsonl none.jsonl": "cannot read none.jsonl: No such file or directory",
    "--shard 0/2 --input 0.jsonl pipe": "pipe can be read once only; pass --input files",
    "--shard 0/2 --ray 2": "not allowed with argument",
    "--ray 0": "--ray",
    "--longest-document 0": "--longest-document",
    "--longest-document 5 --input a.csv": "rows are read whole; omit the option",
    "--shard 0/2 --keys text": "part.00000-of-00002.shard.json was made with other --keys: pass --overwrite, or another",
    "--shard 0/2 --no-end-of-document": "was made with other --no-end-of-document",
    "--shard 0/2 --tokenizer wordpiece": "was made with other --tokenizer",
    "--shard 0/2 --input 0.jsonl 1.jsonl": "was made with other --input",
}


def test_wrong_options_are_one_line(folder, capsys):
    assert run("--shard", "0/2") == 0
    os.mkfifo("pipe")
    pathlib.Path("a.csv").write_text("text,title\na,b\n")
    capsys.readouterr()
    for words, message in WRONG.items():
        assert message in refused(capsys, run(*words.split())), words


def broken(name: str, change) -> None:
    path = pathlib.Path(name)
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_shards_that_do_not_belong_together_are_refused(folder, capsys):
    for index in (0, 1, 2):
        assert run("--shard", f"{index}/3") == 0
    first, second = (f"part.0000{index}-of-00003.shard.json" for index in (0, 1))
    whole = {name: pathlib.Path(name).read_bytes() for name in os.listdir()}
    for change, message in (
        (lambda: os.remove(second), "part: shard 1 of 3 is not complete: run the same command with --shard 1/3"),
        (lambda: [os.remove(name) for name in (first, second)], "part: shards 0, 1 of 3 are not complete"),
        (lambda: pathlib.Path(second).write_text("{}"), f"{second} is no record of a shard: remove it"),
        (lambda: broken(second, lambda one: one.update(first=0)), "does not begin where the shard before it ends"),
        (lambda: broken(second, lambda one: one["made_of"].update(digest="")), f"{second} was made with other --input"),
        (
            lambda: broken(second, lambda one: one["made_of"]["settings"].update({"--split": "x"})),
            "was made with other --split than",
        ),
        (
            lambda: broken(second, lambda one: one["pairs"]["part_text"].update(tokens=1)),
            "and 1 were written: make the",
        ),
        (lambda: pathlib.Path("part.00000-of-00009.shard.json").write_text("{}"), "part has shards of 3 and of 9"),
        (lambda: os.remove("part_title.00002-of-00003.bin"), "cannot read part_title.00002-of-00003.bin"),
        (lambda: pathlib.Path("part_text.00001-of-00003.bin").write_bytes(b"\1"), "the file has 1 bytes"),
        (
            lambda: pathlib.Path("part_text.00001-of-00003.bin").write_bytes(
                bytes(len(whole["part_text.00001-of-00003.bin"]))
            ),
            "part_text.00001-of-00003.bin is damaged: its content has changed since it was written",
        ),
        (lambda: [os.remove(name) for name in os.listdir() if "shard" in name], "there is no complete shard of part"),
    ):
        change()
        capsys.readouterr()
        assert message in refused(capsys, merged())
        assert not any(name in os.listdir() for name in ("part_text.bin", "part_text.bin.unfinished"))
        for name in os.listdir():
            os.remove(name)
        for name, content in whole.items():
            pathlib.Path(name).write_bytes(content)
    assert merged() == 0
    assert "part_text.bin already exists: pass --overwrite" in refused(capsys, merged())
    assert merged("--overwrite") == 0 and merged("--out", "other") == 0
    assert preprocess.main(["merge", "--input", "part_text"]) == 2

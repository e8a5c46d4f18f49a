"""Blocks of README.md and docs/*.md: which are commands, which are their output, and whether the output is still true.

A block of code in a page is one of these:

    a fence of python, toml, json, yaml, ...   a file or a program, no output
    commands alone                              python, pip, pytest, srun, ...
    `$ COMMAND` and its output                  a sample: the command is run, and must print these lines
    after `<!-- text -->`                       a formula, a drawing, or a line of another program
    after `<!-- messages: TEST -->`             what only failures print: the source has these messages, TEST makes them
                                                (its file or its name; left out where no test does)

Anything else is output that no command accounts for, and an error. A comment, on a line of its own or at the end of the
last line before a sample, says how it is run:

    <!-- sample: slow -->                       with -m slow, in a process of its own; others run in the test's process
    <!-- sample: slow, compiler -->             and only where XLA's CUDA compiler is installed
    <!-- sample: varies "fit; # s", "jax *" --> in these words # is any number and * any word: times, paths, versions
    <!-- file: ours.toml -->                    the next fence is a file in the directory where the page's commands run

The output is stdout and stderr together. Lines longer than a page's are wrapped. A line `...` stands for lines that the
page leaves out: what is before it are the output's first lines, what is after it its last ones. `| head -N`, `| tail -N`,
`| cut -c-N` and `| grep WORDS` mean what they do in a shell. Of a command without lines below it nothing is compared.

    python -m tests.samples --update            rewrites the samples of all pages; --slow also those that are slow
    python -m tests.samples --update docs/planning.md --slow -k deadline
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import io
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import textwrap
import warnings
from unittest import mock

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Tables too long for a page: the command, and what it prints. mfu_cpu.txt holds measured times.
PAGES += [path for path in sorted((ROOT / "benchmarks/results").glob("*.txt")) if path.stem != "mfu_cpu"]
WIDTH = 116  # of an output's line in a page: 120 columns, 4 of them the block's indentation
FILES = {"python", "toml", "json", "jsonl", "yaml", "mermaid", "diff"}  # fences that hold no output
COMMANDS = {
    "python",
    "pip",
    "pytest",
    "megajax",
    "srun",
    "mpirun",
    "sbatch",
    "kubectl",
    "git",
    "cd",
    "export",
    "source",
}
COMMANDS |= {"for", "done;", "done", "ls", "cat", "mkdocs"}
ELISION = "..."


class SampleError(Exception):
    """A sample in a page that is not what its command prints."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Lines [start, end) of a page, without fences; `note` is the comment above it."""

    page: pathlib.Path
    start: int
    end: int
    indent: str
    language: str | None  # of a fence; None for an indented block
    note: str
    lines: tuple[str, ...]  # without indentation

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.start + 1}"

    @property
    def kind(self) -> str:
        """One of file, text, messages, sample, commands, or output, of which no command is known."""
        if self.language in FILES:
            return "file"
        word = re.match(r"\w+", self.note)
        if word and word[0] in ("text", "messages"):
            return word[0]
        if self.lines[0].startswith("$ "):
            return "sample"
        return "commands" if all(is_command(line) for line in joined(self.lines)) else "output"

    @property
    def marks(self) -> set[str]:
        return set(re.findall(r"\b(slow|compiler)\b", self.note.partition("varies")[0]))

    @property
    def varying(self) -> list[str]:
        return re.findall(r'"([^"]+)"', self.note.partition("varies")[2])

    def steps(self) -> list["Step"]:
        """Of a sample."""
        found: list[Step] = []
        for line in self.lines:
            if line.startswith("$ "):
                found.append(Step([line], []))
            elif not found[-1].output and found[-1].source[-1].endswith("\\"):
                found[-1].source.append(line)
            else:
                found[-1].output.append(line)
        return found


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of a sample: the lines that it is written on, and those below it."""

    source: list[str]
    output: list[str]

    @property
    def command(self) -> str:
        return re.sub(r"\\\n\s*", "", "\n".join(self.source)).removeprefix("$ ")


def joined(lines: tuple[str, ...]) -> list[str]:
    """The lines with those that end in a backslash continued."""
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def is_command(line: str) -> bool:
    word = line.split()[0]
    return word in COMMANDS or word.startswith("#") or re.match(r"[A-Z_]+=\S* \w", line) is not None


def blocks(page: pathlib.Path) -> list[Block]:
    """All blocks of code of a page: fenced, and indented by four columns or more after an empty line."""
    lines, found, note, at = page.read_text().splitlines(), [], "", 0
    if page.suffix == ".txt":
        return [block(page, lines, 0, len(lines), "", None, "")]
    while at < len(lines):
        line = lines[at]
        fence = re.match(r"( *)```(\w*)", line)
        comment = re.search(r"<!-- *((?:sample|text|messages|file).*?) *-->$", line)
        if fence:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            found.append(block(page, lines, at + 1, end, fence[1], fence[2], note))
            note, at = "", end + 1
        elif line.startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            while not lines[end - 1].strip():
                end -= 1
            indent = line[: len(line) - len(line.lstrip())]
            found.append(block(page, lines, at, end, indent, None, note))
            note, at = "", end
        else:
            note = comment[1] if comment else note if not line.strip() else ""
            at += 1
    return found


def block(page, lines, start, end, indent, language, note) -> Block:
    inside = tuple(line.removeprefix(indent).rstrip() for line in lines[start:end])
    return Block(page, start, end, indent, language, note, inside or ("",))


def files(page: pathlib.Path) -> dict[str, str]:
    """The files that a page shows after `<!-- file: NAME -->`."""
    named = [(block.note.partition("file:")[2].strip(), block) for block in blocks(page) if "file:" in block.note]
    return {name: "\n".join(block.lines) + "\n" for name, block in named}


def printed(command: str, separate: bool) -> list[str]:
    """The lines that a command prints in the working directory; `separate`: in a process of its own."""
    first, *pipes = [shlex.split(part) for part in re.split(r" \| ", command)]
    words = ["megajax", *first[1:]] if first[0] == "megajax" else first[2:]
    assert first[0] == "megajax" or first[:2] == ["python", "-m"], command
    output = in_process_of_its_own(words) if separate else in_this_process(words)
    lines = [line.rpartition("\r")[2].rstrip() for line in output.splitlines()]
    if "Traceback (most recent call last):" in lines:
        raise SampleError(f"{command}\n{output}")
    for pipe in pipes:
        match pipe:
            case ["head", count]:
                lines = lines[: -int(count)]
            case ["tail", count]:
                lines = lines[int(count) :]
            case ["cut", columns] if columns.startswith("-c-"):
                lines = [line[: int(columns.removeprefix("-c-"))].rstrip() for line in lines]
            case ["grep", words]:
                lines = [line for line in lines if words in line]
            case _:
                raise SampleError(f"{command}: only head -N, tail -N, cut -c-N and grep WORDS are known after a |")
    return "\n".join(lines).strip("\n").splitlines()


def wrap(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def in_this_process(words: list[str]) -> str:
    output = io.StringIO()
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.dict(os.environ, {"COLUMNS": "120"}),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        contextlib.suppress(SystemExit),
        warnings.catch_warnings(action="ignore"),  # of runpy, that the module is imported already
    ):
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return output.getvalue()


def in_process_of_its_own(words: list[str]) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PJRT_NPROC")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "COLUMNS": "120"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


def shown(output: list[str], before: list[str], varying: list[str]) -> list[str]:
    """What a page shows of an output, if it shows `before` today: the same number of first and last lines."""
    if not before:
        return []
    lines = output
    if ELISION in before:
        first, last = before.index(ELISION), len(before) - before.index(ELISION) - 1
        if first + last < len(output):
            lines = [*output[:first], ELISION, *output[len(output) - last :]]
    kept = {without(line, varying): line for line in before}
    return [kept.get(without(line, varying), line) for line in lines]  # another time alone changes no page


def without(line: str, varying: list[str]) -> str:
    """The line with the numbers and words that vary left out, and columns that moved because of them closed up."""
    for words in varying:
        pattern = re.escape(words).replace(r"\#", r"-?[\d.,]*\d").replace(r"\*", r"\S+").replace(r"\ ", r"\s+")
        line = re.sub(pattern, words, line)
    return line


def run(block: Block) -> list[str]:
    """The lines of a sample's block as they should be today."""
    lines = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in files(block.page).items():
            pathlib.Path(name).write_text(text)
        for name in ("megajax", "experiments"):  # commands name files in them
            pathlib.Path(name).symlink_to(ROOT / name)
        for step in block.steps():
            before = "\n".join(step.output).rstrip("\n").splitlines()
            output = printed(step.command, separate="slow" in block.marks)
            if block.page.suffix == ".md":
                output = [part for line in output for part in wrap(line)]
            lines += step.source + shown(output, before, block.varying) + step.output[len(before) :]
    return lines


def check(block: Block) -> None:
    """Raises SampleError if the block is not what its commands print."""
    today = run(block)
    if tuple(today) != block.lines:
        difference = difflib.unified_diff(block.lines, today, "in the page", "today", n=1, lineterm="")
        raise SampleError(f"{block.place}: run python -m tests.samples --update --slow\n" + "\n".join(difference))


def update(page: pathlib.Path, slow: bool, words: str) -> list[str]:
    """Rewrites the samples of a page that contain `words`; returns the places that changed."""
    changed = []
    for block in reversed(blocks(page)):  # from the end, so that line numbers stay
        chosen = block.kind == "sample" and words in "\n".join(block.lines) and (slow or "slow" not in block.marks)
        if not chosen or ("compiler" in block.marks and not has_compiler()):
            continue
        try:
            today = run(block)
        except SampleError as error:
            print(f"left as it was: {block.place}: {error}")
            continue
        if tuple(today) != block.lines:
            lines = page.read_text().splitlines()
            lines[block.start : block.end] = [(block.indent + line).rstrip() for line in today]
            page.write_text("\n".join(lines) + "\n")
            changed.append(block.place)
    return changed


def has_compiler() -> bool:
    return any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.samples", description="Rewrites the samples in the pages.")
    parser.add_argument("pages", nargs="*", type=pathlib.Path, help="default: README.md and docs/*.md")
    parser.add_argument("--update", action="store_true", required=True)
    parser.add_argument("--slow", action="store_true", help="also those that are marked slow")
    parser.add_argument("-k", dest="words", default="", help="only samples that contain these words")
    given = parser.parse_args()
    for page in given.pages or PAGES:
        for place in update(page.resolve(), given.slow, given.words):
            print(f"changed: {place}")


if __name__ == "__main__":
    main()

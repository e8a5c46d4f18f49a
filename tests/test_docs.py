"""README and docs: every command, option, test, file and link that they name exists, and lines fit in 120 columns."""

import ast
import configparser
import contextlib
import functools
import importlib.util
import io
import itertools
import pathlib
import re
import runpy
import shlex
import sys
from unittest import mock

import pytest

import megajax
from megajax.commands import BENCHMARKS, COMMANDS
from megajax.config import PRESETS
from megajax.schedules.registry import SPECS
from tests.config.make_coming_from import MARK

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Of megajax.data.preprocess and megajax.interop.hugging_face.
SUBCOMMANDS = ("merge", "inspect", "verify", "import", "export")
# Commands that also take every option of the training command.
WITH_TRAINING_OPTIONS = (
    "megajax.checkpoint.inspect",  # after --
    "megajax.launch",
    "megajax.plan.dryrun",
    "megajax.verify",
    "benchmarks.communication",
    "benchmarks.mfu",
)
OF_OTHERS = {  # options that are not megajax's
    "--xla_gpu_enable_pipelined_p2p",
    "--xla_gpu_deterministic_ops",
    "--xla_gpu_enable_triton_gemm",
    "--overlapping-eval",  # of Megatron-LM
    "--micro-batch-size",
    "--strict-lambada",
}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text(page: pathlib.Path) -> str:
    """The page with continued command lines joined."""
    return re.sub(r" \\\n\s*", " ", page.read_text())


@functools.cache
def options(module: str, subcommand: str | None = None) -> frozenset[str]:
    """The options of `python -m module [subcommand]`, from its own --help."""
    words, shown = [subcommand] if subcommand else [], io.StringIO()
    with (
        mock.patch.object(sys, "argv", [module, *words, "--help"]),
        contextlib.redirect_stdout(shown),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    found = frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", shown.getvalue()))
    assert found, f"python -m {module} --help prints no option"
    return found | options("experiments.gpt3") if module in WITH_TRAINING_OPTIONS else found


def commands(page: pathlib.Path) -> list[tuple[str, list[str]]]:
    """(module, words) of every `python -m module ...` and `megajax NAME ...`, in blocks and inside sentences."""
    code = re.findall(r"^    (.*)$", text(page), re.MULTILINE)
    code += re.findall(r"`([^`]+)`", text(page).replace("```", ""))
    code += re.findall(r"^(python -m .*)$", text(page), re.MULTILINE)
    for block in re.findall(r"^```sh\n(.*?)^```$", text(page), re.MULTILINE | re.DOTALL):
        code += block.splitlines()
    found = []
    for line in code:
        for module, rest in re.findall(r"python -m ([\w.]+)([^#&|;]*)", line.replace("\n", " ")):
            found.append((module, shlex.split(rest.replace("$i", "0"))))
        for name, rest in re.findall(r"^megajax ((?:bench )?[a-z][\w-]*)([^#&|;]*)", line.replace("\n", " ")):
            command = (BENCHMARKS if name.startswith("bench ") else COMMANDS)[name.removeprefix("bench ")]
            if command.module:  # not `megajax bench`, which lists others
                found.append((command.module, [*command.words, *shlex.split(rest)]))
    return found


@pages
def test_commands_and_their_options_exist(page):
    assert commands(page)
    for module, words in commands(page):
        if module == "pytest":
            continue
        assert importlib.util.find_spec(module), f"python -m {module}"
        subcommand = words[0] if words and words[0] in SUBCOMMANDS else None
        parts = [part for word in words for part in word.split()]  # a word may hold options: --a "--data 8"
        named = {part.partition("=")[0] for part in parts if part.startswith("--")} - {"--help", "--"}
        if module == "experiments.own_model":  # a script without options
            assert not named
        elif named:
            assert named <= options(module, subcommand), f"python -m {module} {' '.join(words)}"


@pages
def test_options_in_sentences_exist(page):
    """Those that stand alone, without a command, belong to some command of the page, or to the training command."""
    known = set(options("experiments.gpt3")) | OF_OTHERS
    for module, words in commands(page):
        if module not in ("pytest", "experiments.own_model"):
            known |= options(module, words[0] if words and words[0] in SUBCOMMANDS else None)
    known |= {option.replace("--", "--no-", 1) for option in known}
    prose = re.sub(r"`(pytest|pip|sbatch|srun)[^`]*`", "", text(page))
    prose = prose.partition(MARK)[
        0
    ]  # tables of other tools' options, which a test of their own compares with the parsers
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", prose))
    assert named <= known | {"--help"}


@pages
def test_tests_that_are_named_exist(page):
    """`pytest FILE -k WORDS`: the file exists, and each word is part of a test's name in it."""
    for line in re.findall(r"`pytest ([^`]+)`", text(page)):
        words = shlex.split(line)
        paths = [ROOT / word for word in words if word.startswith("tests/")]
        assert all(path.exists() for path in paths), line
        if "-k" in words:
            files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
            functions = [node.name for file in files for node in ast.walk(ast.parse(file.read_text())) if is_test(node)]
            for word in words[words.index("-k") + 1].split(" or "):
                assert any(word in name for name in functions), f"no test of {line} has {word!r} in its name"


def is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


@pages
def test_files_and_links_exist(page):
    prose = text(page)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target
    for name in re.findall(r"`((?:megajax|tests|experiments|benchmarks|scripts|docs)/[\w./-]+)`", prose):
        assert (ROOT / name).exists(), name


def anchors(page: pathlib.Path) -> list[str]:
    """The headings of a page as GitHub's anchors."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pages
def test_extras_exist(page):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert set(re.findall(r'"(?:megajax|\.)\[(\w+)\]"', text(page))) <= set(setup["options.extras_require"])


@pages
def test_lines_fit_in_120_columns(page):
    assert [line for line in page.read_text().splitlines() if len(line) > 120] == []


def table(page: pathlib.Path, heading: str) -> list[list[str]]:
    """Rows of the table whose head starts with `heading`: the names in backquotes of each first cell."""
    rows = page.read_text().split(f"| {heading} |")[1].splitlines()[2:]
    rows = itertools.takewhile(lambda line: line.startswith("|"), rows)
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in rows]


def test_the_table_of_models_has_every_preset():
    """`-350m` after `gpt3-125m` is short for gpt3-350m."""
    names = []
    for first, *others in table(ROOT / "README.md", "`--model`"):
        prefix = first.partition("-")[0]
        names += [first, *(prefix + name if name.startswith("-") else name for name in others)]
    assert sorted(names) == sorted(PRESETS)


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "`--schedule`"), ("docs/schedules.md", "schedule")], ids=["README", "schedules"]
)
def test_the_tables_of_schedules_have_every_schedule(page, heading):
    names = {name for row in table(ROOT / page, heading) for name in row if "." not in name}
    assert names | {"auto"} == {name for name, spec in SPECS.items() if spec.trains}


def test_the_page_of_commands_has_every_command():
    """Each with the summary that `megajax` prints, and an example."""
    page = (ROOT / "docs/commands.md").read_text()
    sections = re.findall(r"^### ([\w-]+)\n\n((?:\S.*\n)+)\n    megajax ([\w-]+)", page, re.MULTILINE)
    summaries = {name: " ".join(text.split()).rstrip(".?").lower() for name, text, _ in sections}
    assert summaries == {name: command.summary.rstrip("?").lower() for name, command in COMMANDS.items()}
    assert [example for _, _, example in sections] == list(COMMANDS)
    benchmarks = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page, re.MULTILINE)
    assert benchmarks == [(name, command.summary) for name, command in BENCHMARKS.items()]


def test_the_contents_have_every_page():
    named = re.findall(r"^\* \[.*\]\((.*)\)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted({page.name for page in PAGES[1:]} - {"index.md"} | {"api/index.rst"})


def test_the_reference_has_every_public_name():
    reference = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.rst"))
    named = re.findall(r"^\.\. auto(?:class|function|exception):: megajax\.(\w+)$", reference, re.MULTILINE)
    assert sorted(named) == sorted(megajax.__all__)


@pytest.mark.slow
def test_the_librarys_example_trains(tmp_path, monkeypatch, capsys):
    """The README's, for two steps."""
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert example.count("steps=100") == 1 and len(example.splitlines()) <= 10
    exec(
        example.replace("steps=100, ", "steps=2, validation_batches=0, ").replace("warmup_steps=10", "warmup_steps=1"),
        {},
    )
    assert 4 < float(capsys.readouterr().out.splitlines()[-1]) < 6
    assert (tmp_path / "runs/library/checkpoints/step_00000002").is_dir()


@pages
def test_words_of_this_project_are_linked_to_the_glossary(page):
    """A page that uses one of these has a link with it; words that have another sense too are not looked for."""
    words = ("inbox", "merged tick", "mixed tick", "paired tick", "stash")
    text = re.sub(r"```.*?```|`[^`]*`|^ {4}.*$|^[#|].*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    if page.name not in ("glossary.md", "coming_from.md", "verification.md", "limitations.md"):
        for word in words:
            if re.search(rf"\b{word}\b", text):
                assert re.search(rf"\[{word}\w*\]\((docs/)?glossary\.md", text), word

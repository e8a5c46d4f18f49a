"""Every output in README.md and docs/ is what its command prints today; tests/samples.py says how a page marks them.

After a change of an answer: python -m tests.samples --update --slow
"""

import ast
import functools
import re

import pytest

from tests import samples
from tests.samples import PAGES, ROOT, Block, SampleError, blocks

OF_THEIR_OWN = {"tutorial.md": "tests/test_tutorial.py"}  # tests that run a whole page
RESULTS = ("memory_model", "time_model", "held_out", "standing_questions", "rankings", "published")
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def of_kind(kind: str) -> list:
    """Parameters of a test: all blocks of a kind, with the marks that the page gives them."""
    found = []
    for page in PAGES:
        for number, block in enumerate(block for block in blocks(page) if block.kind == kind):
            marks = [getattr(pytest.mark, mark) for mark in sorted(block.marks)]
            found.append(pytest.param(block, id=f"{page.name}-{number + 1}", marks=marks))
    return found


@pages
def test_every_output_has_a_command(page):
    if page.name in OF_THEIR_OWN:
        assert page.name in (ROOT / OF_THEIR_OWN[page.name]).read_text()
    else:
        assert [block.place for block in blocks(page) if block.kind == "output"] == []


@pytest.mark.parametrize("block", of_kind("sample"))
def test_the_sample_is_what_its_command_prints(block):
    samples.check(block)


def test_accuracies_of_the_planning_page_are_those_of_the_result_files():
    """Their commands run in the samples of the files; in the page they are slow."""
    results = [(ROOT / f"benchmarks/results/{name}.txt").read_text().splitlines() for name in RESULTS]
    (block,) = [block for block in blocks(ROOT / "docs/planning.md") if "benchmarks.compiled memory" in block.lines[0]]
    steps = block.steps()
    assert len(steps) == len(RESULTS)
    for step, lines in zip(steps, results, strict=True):
        assert step.output and set(step.output) <= set(lines), step.command


@functools.cache
def messages() -> set[tuple[str, ...]]:
    """The strings of the source, each as the parts between its values; those of a few letters say nothing."""
    found = set()
    for file in [*ROOT.glob("megajax/**/*.py"), *ROOT.glob("experiments/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add(tuple(part.value for part in node.values if isinstance(part, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add((node.value,))
    return {parts for parts in found if len("".join(parts)) >= 12 and " " in "".join(parts).strip()}


@pytest.mark.parametrize("block", of_kind("messages"))
def test_messages_are_those_of_the_source(block):
    """Of every message a third or more is in the source, the rest is its values; what the page names exists."""
    file, _, name = block.note.removeprefix("messages").strip(": ").partition("::")
    assert not file or (ROOT / file).is_file()
    assert not name or f"def {name}(" in (ROOT / file).read_text()
    beginning = r"\n(?=error|warning|step \d|\d\d:\d\d)"  # other lines continue the one before
    for message in re.split(beginning, "\n".join(block.lines)):
        text, known = message.replace("\n", " "), set()
        for parts in messages():
            if all(part in text for part in parts):  # most are not, and regular expressions take long
                pattern = ".{1,100}?".join(map(re.escape, parts))
                known.update(at for match in re.finditer(pattern, text) for at in range(*match.span()))
        assert len(known) >= len(text) / 3, message


FAILURES = "python -m experiments.failures --gpus 4096"


@pytest.fixture
def blocks_of(tmp_path):
    """The blocks of a page with this text."""

    def write(text: str) -> list[Block]:
        (tmp_path / "page.md").write_text(text)
        return blocks(tmp_path / "page.md")

    return write


def test_an_output_without_a_command_is_found(blocks_of):
    assert [block.kind for block in blocks_of("It prints\n\n    GPUs 8, step 1.0 s\n\nand ends.\n")] == ["output"]
    assert [block.kind for block in blocks_of("It prints\n\n```\nGPUs 8, step 1.0 s\n```\n")] == ["output"]
    assert [block.kind for block in blocks_of(f"    {FAILURES}\n\n    one GPU fails\n")] == ["output"]
    assert [block.kind for block in blocks_of(f"    {FAILURES} \\\n      --save 3\n    pip install x\n")] == [
        "commands"
    ]
    assert [block.kind for block in blocks_of("<!-- text -->\n\n    y = a x\n\nand\n\n    y = b x\n")] == [
        "text",
        "output",
    ]


def test_a_figure_that_changed_is_found_and_rewritten(blocks_of, tmp_path):
    before = f"The answer:\n\n    $ {FAILURES}\n    one GPU fails every 1 hours\n\nThat is all.\n"
    [block] = blocks_of(before)
    with pytest.raises(SampleError, match="- ?one GPU fails every 1 hours"):
        samples.check(block)
    assert samples.update(block.page, slow=False, words="of another sample") == []
    assert samples.update(block.page, slow=False, words="failures") == ["page.md:3"]
    [block] = blocks(block.page)
    samples.check(block)
    assert len(block.lines) > 4 and block.page.read_text().endswith("\n\nThat is all.\n")


def test_lines_that_are_left_out_are_those_between_the_first_and_the_last(blocks_of):
    [block] = blocks_of(
        f"    $ {FAILURES}\n    one\n    ...\n    last\n\n    $ {FAILURES} | grep 4,096 | head -1\n    x\n"
    )
    today = samples.run(block)
    assert today[1].startswith("one GPU fails") and today[2] == "..." and today[3] == "  0.1% of time"
    assert today[4:6] == ["", f"$ {FAILURES} | grep 4,096 | head -1"] and today[6].startswith("   4,096")
    assert len(today) == 7


def test_only_what_is_said_to_vary_may(blocks_of, monkeypatch):
    monkeypatch.setattr(samples, "printed", lambda command, separate: ["12 fit; 8.1 s, of jax 0.12"])
    page = '<!-- sample: varies "fit; # s", "jax *" -->\n\n    $ python -m x\n    {}\n'
    samples.check(blocks_of(page.format("12 fit; 9.75 s, of jax 0.13"))[0])
    with pytest.raises(SampleError):
        samples.check(blocks_of(page.format("13 fit; 9.75 s, of jax 0.13"))[0])


def test_the_files_of_a_page_are_there(blocks_of, monkeypatch):
    page = "<!-- file: ours.toml -->\n\n```toml\ngpus = 8\n```\n\n    $ python -m x\n    gpus = 8\n"
    monkeypatch.setattr(samples, "printed", lambda command, separate: open("ours.toml").read().splitlines())
    samples.check(blocks_of(page)[1])

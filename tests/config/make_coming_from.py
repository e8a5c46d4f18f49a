"""Writes the tables of docs/coming_from.md from megajax/config/foreign: `python -m tests.config.make_coming_from`."""

import pathlib
import re
import textwrap

from megajax.config.foreign import COMMON, OF_COMMANDS, TOOLS, Entry

PAGE = pathlib.Path(__file__).parents[2] / "docs/coming_from.md"
MARK = "<!-- The tables below are written by tests/config/make_coming_from.py. -->\n"
WIDTH = 120
HEADINGS = {
    "nanoGPT": "train.py",
    "Megatron-LM": "arguments.py",
    "Hugging Face": "TrainingArguments",
    "torchtitan": "configuration",
    "DeepSpeed": "launcher, configuration",
}


def tables() -> str:
    """The page from MARK on."""
    parts = [MARK]
    for tool, entries in TOOLS.items():
        parts += [f"## {tool}\n", table(HEADINGS[tool], entries)]
    parts += ["## Other names\n", table("typed", COMMON)]
    parts += ["## Other commands\n", "Names that are tried in other commands than the training:\n"]
    for command, entries in OF_COMMANDS.items():
        parts.append(table(f"megajax {command}", entries))
    return "\n".join(parts)


def table(heading: str, entries: dict[str, Entry]) -> str:
    """Rows of name, option here, remark; a remark that is too long for a line continues in the next row."""
    rows = [f"| {heading} | here | |", "|---|---|---|"]
    for name, (options, remark) in entries.items():
        start = f"| `{name}` | {f'`{options}`' if options else ''} | "
        marked = re.sub(r"(--[a-z][a-z-]*|megajax [a-z-]+ --[a-z-]+)", r"`\1`", remark)
        lines = (
            [marked]
            if len(start + marked) <= WIDTH - 2
            else textwrap.wrap(marked, WIDTH - 2 - len(start), break_on_hyphens=False, break_long_words=False)
        )
        rows += [(start if not place else "| | | ") + line + " |" for place, line in enumerate(lines or [""])]
    return "\n".join(row.replace("|  |", "| |") for row in rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + tables())

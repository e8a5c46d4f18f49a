"""Writes the table of docs/verification.md: the slow tests of each file that CI does not run.

python scripts/tests_outside_ci.py    needs the extras test, judges and eval
"""

import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/verification.md"
LISTS = ("slow_tests", "judge_tests", "extra_tests")


def collected(*names: str) -> set[str]:
    """The ids of the slow tests among these."""
    words = [sys.executable, "-m", "pytest", "-n0", "-q", "--collect-only", "-m", "slow", *names]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pytest cannot collect the tests: {(done.stdout + done.stderr).strip()[-300:]}")
    return {line for line in done.stdout.splitlines() if re.match(r"tests/\S+::", line)}


def main() -> None:
    """Replaces the sentence with the count, and the rows of the table."""
    lists = [(ROOT / ".ci" / name).read_text().splitlines() for name in LISTS]
    listed = [line for lines in lists for line in lines if line and not line.startswith("#")]
    left = collected() - collected(*listed)
    files = collections.Counter(name.partition("::")[0] for name in left)
    text = PAGE.read_text()
    text = re.sub(r"[\d,]+ in \d+ files\.", f"{len(left):,} in {len(files)} files.", text, count=1)
    rows = "".join(f"| `{file}` | {count} |\n" for file, count in sorted(files.items()))
    head = "| file | slow tests |\n|---|---|\n"
    start = text.index(head) + len(head)
    PAGE.write_text(text[:start] + rows + re.sub(r"\A(\|.*\n)*", "", text[start:]))


if __name__ == "__main__":
    main()

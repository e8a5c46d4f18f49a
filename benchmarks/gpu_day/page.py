"""The results of benchmarks.gpu_day as one HTML file that loads nothing else; `verdict` computes its sentences.

It imports no jax, so that the page is also written where jax does not start.
"""

import collections
import os
import pathlib
from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.gpu_day.sections import part_section, shown_status
from benchmarks.gpu_day.style import STYLE
from benchmarks.gpu_day.values import COMPILER, PARTS, Case, Record, by_part, cases, decimal, device, number, record
from benchmarks.gpu_day.verdict import claims
from megajax.config.toml import save_config

VERDICT = {  # what fails comes first
    False: ("fails", "✗", "May not be claimed"),
    True: ("holds", "✓", "May be claimed"),
    None: ("unknown", "–", "Not measured"),
}


def write(results: Record, path: str | os.PathLike[str]) -> None:
    """Writes `page(results)` atomically: a run that ends while it writes leaves the previous page.

    Raises:
      ConfigError: the file cannot be written.
    """
    save_config(pathlib.Path(path), page(results), "pass a writable path")


def page(results: Record) -> str:
    """The page.

    Args:
      results: gpu_day.json, of which any part may be missing or null.
    """
    count = number(record(results.get("device")).get("count"))
    title = f"GPU day: {'' if count is None else f'{count:.0f} × '}{device(results)}"
    everything = cases(results)
    sections = [
        _section("verdict", "Verdict", _verdict(results)),
        _section("cases", "All cases", _summary(everything)),
        *(
            _section(part, PARTS.get(part, part), part_section(part, some))
            for part, some in by_part(everything).items()
        ),
        _section("commands", "Commands", _commands(results.get("command"), everything)),
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{_header(results)}
</header>
{"".join(sections)}</body>
</html>
"""


def _section(identity: str, heading: str, content: str) -> str:
    return f'<section id="{escape(identity)}">\n<h2>{escape(heading)}</h2>\n{content}\n</section>\n'


def _header(results: Record) -> str:
    """The device, the versions, and a note where the device is no GPU."""
    machine = record(results.get("device"))
    details = {"started": results.get("started")}
    details |= {key: machine.get(key) for key in ("platform", "runtime", "processor", "cores")}
    if isinstance(details["runtime"], list):
        details["runtime"] = ", ".join(map(str, details["runtime"]))
    lines = [
        ", ".join(f"{label} {value}" for label, value in several.items() if value not in (None, ""))
        for several in (details, record(results.get("versions")))
    ]
    text = "".join(f'<p class="soft">{escape(line)}</p>' for line in lines if line)
    if (platform := machine.get("platform")) == COMPILER:
        text += '<p class="note">The programs were compiled on a machine without this GPU: nothing was run.</p>'
    elif platform not in (None, "gpu", "cuda", "rocm"):
        text += f'<p class="note">This ran on {escape(str(platform))}: it supports no claim about GPUs.</p>'
    return text


def _verdict(results: Record) -> str:
    """The claims: those that hold, those that do not, and those that were not measured."""
    found, lists = claims(results), []
    for holds, (style, mark, heading) in VERDICT.items():
        items = "".join(
            f'<li><i class="mark">{mark}</i><span>{escape(one.text)}</span></li>' for one in found if one.holds is holds
        )
        if items:
            lists.append(f'<h3>{heading}</h3><ul class="claims {style}">{items}</ul>')
    return "".join(lists)


def _summary(everything: Sequence[Case]) -> str:
    """How many cases have each status, and a table of all by part."""
    if not everything:
        return "<p>No case has ended.</p>"
    failed = [case for case in everything if case.status not in ("passed", "not run")]
    rest = [case for case in everything if case not in failed]
    counts = collections.Counter(case.status for case in (*failed, *rest))
    boxes = "".join(f"<div><dt>{shown_status(one)}</dt><dd>{count}</dd></div>" for one, count in counts.items())
    groups = {"Did not pass": failed} if failed else {}
    groups |= {PARTS.get(part, part): some for part, some in by_part(rest).items()}
    body = ""
    for title, group in groups.items():
        heading = escape(title)
        lines = [f'<tr><th scope="rowgroup" colspan="3" class="text">{heading}</th></tr>', *map(_summary_line, group)]
        body += f"<tbody>{''.join(lines)}</tbody>"
    head = '<tr><th class="text">status</th><th class="text">case, reason</th><th>seconds</th></tr>'
    return f'<dl class="facts">{boxes}</dl><table class="full"><thead>{head}</thead>{body}</table>'


def _summary_line(case: Case) -> str:
    reason = f'<div class="soft">{escape(case.reason)}</div>' if case.reason else ""
    return (
        f'<tr><td class="text">{shown_status(case.status)}</td>'
        f'<td class="text wrap">{escape(case.name)}{reason}</td><td>{decimal(case.seconds)}</td></tr>'
    )


def _commands(whole: Any, everything: Sequence[Case]) -> str:
    """The command of the whole, and those of each case and its reference."""
    found = [("All cases", whole)]
    for case in everything:
        found.append((case.name, case.result.get("command")))
        found.append((f"{case.name}, reference", case.result.get("reference_command")))
    items = "".join(
        f'<p class="soft">{escape(label)}:</p><pre class="command"><code>{escape(str(command))}</code></pre>'
        for label, command in found
        if command
    )
    return items or "<p>No command is recorded.</p>"

"""The results of benchmarks.gpu_day as one HTML file that loads nothing else; `verdict` computes its sentences.

It imports no jax, so that the page is also written where jax does not start.
"""

import collections
import os
import pathlib
from html import escape

from benchmarks.gpu_day.sections import part_section, shown_status
from benchmarks.gpu_day.style import STYLE
from benchmarks.gpu_day.values import Record, cases, decimal, device, name, number, parts, record, status
from benchmarks.gpu_day.verdict import claims
from megajax.config.toml import save_config

VERDICT = {
    True: ("holds", "✓", "May be claimed"),
    False: ("fails", "✗", "May not be claimed"),
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
    title = f"GPU day: {_title(results)}"
    sections = [
        _section("verdict", "Verdict", _verdict(results)),
        _section("cases", "All cases", _summary(results)),
        *(
            _section(part, heading, part_section(part, cases(results, part)))
            for part, heading in parts(results).items()
        ),
        _section("commands", "Commands", _commands(results)),
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


def _title(results: Record) -> str:
    count = number(record(results.get("device")).get("count"))
    return device(results) if count is None else f"{count:.0f} × {device(results)}"


def _header(results: Record) -> str:
    """The device, the versions, and a note where the device is no GPU."""
    machine = record(results.get("device"))
    runtime = machine.get("runtime")
    details = {
        "started": results.get("started"),
        "platform": machine.get("platform"),
        "runtime": ", ".join(map(str, runtime)) if isinstance(runtime, list) else runtime,
        "processor": machine.get("processor"),
        "cores": machine.get("cores"),
    }
    versions = {str(package): version for package, version in record(results.get("versions")).items()}
    lines = [
        ", ".join(f"{label} {value}" for label, value in several.items() if value not in (None, ""))
        for several in (details, versions)
    ]
    text = "".join(f'<p class="soft">{escape(line)}</p>' for line in lines if line)
    if (platform := machine.get("platform")) not in (None, "gpu", "cuda", "rocm"):
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


def _summary(results: Record) -> str:
    """How many cases have each status, and a table of all by part."""
    everything = cases(results)
    if not everything:
        return "<p>No case has ended.</p>"
    counts = collections.Counter(map(status, everything))
    facts = "".join(f"<div><dt>{shown_status(one)}</dt><dd>{count}</dd></div>" for one, count in counts.items())
    bodies = []
    for part, heading in parts(results).items():
        lines = [f'<tr><th scope="rowgroup" colspan="3" class="text">{escape(heading)}</th></tr>']
        for case in cases(results, part):
            reason = f'<div class="soft">{escape(str(case["reason"]))}</div>' if case.get("reason") else ""
            lines.append(
                f'<tr><td class="text">{shown_status(status(case))}</td>'
                f'<td class="text wrap">{escape(name(case))}{reason}</td><td>{decimal(case.get("seconds"))}</td></tr>'
            )
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    head = '<tr><th class="text">status</th><th class="text">case, reason</th><th>seconds</th></tr>'
    return f'<dl class="facts">{facts}</dl><table class="full"><thead>{head}</thead>{"".join(bodies)}</table>'


def _commands(results: Record) -> str:
    """The command of the whole, and those of each case and its reference."""
    found = [("All cases", results.get("command"))]
    for case in cases(results):
        result = record(case.get("result"))
        found.append((name(case), result.get("command")))
        found.append((f"{name(case)}, reference", result.get("reference_command")))
    items = "".join(
        f'<p class="soft">{escape(label)}:</p><pre class="command"><code>{escape(str(command))}</code></pre>'
        for label, command in found
        if command
    )
    return items or "<p>No command is recorded.</p>"

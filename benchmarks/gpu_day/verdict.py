"""What a run of benchmarks.gpu_day shows: the sentences that the README may claim, and those that it may not.

The sentences are computed from the numbers and statuses alone. A case that is marked as passed and whose numbers exceed
their limit, or are missing, does not support a claim.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Sequence

from benchmarks.gpu_day.values import (
    FINISHED,
    PARTS,
    SLOW_FACTOR,
    Record,
    cases,
    decimal,
    device,
    is_measured,
    kernel_ratio,
    largest,
    name,
    number,
    parts,
    positive,
    prediction_error,
    record,
    relative,
    rows,
    scientific,
    share,
    speedup,
    status,
)
from megajax.schedules.errors import counted

PRECISION = re.compile(r"\b(?:fp32|tf32|bf16|fp16|fp8)\b")
OURS = "megajax"
KERNEL_ERRORS = ("output", "gradients", "limit")


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence.

    Attributes:
      holds: whether the run shows it; False if a case contradicts it or failed; None if it was not measured.
      text: the sentence, which names the cases that contradict it.
    """

    holds: bool | None
    text: str


@dataclasses.dataclass(frozen=True)
class _Sentence:
    """A sentence about compared cases: "SUBJECT VERB OBJECT", or with `denial` in place of `verb`."""

    subject: str
    verb: str
    denial: str
    object: str


@dataclasses.dataclass
class _Count:
    """Comparisons of a group of cases."""

    agreeing: int = 0
    compared: int = 0
    differing: list[str] = dataclasses.field(default_factory=list)
    without_numbers: list[str] = dataclasses.field(default_factory=list)
    ratios: list[float] = dataclasses.field(default_factory=list)

    def add(self, label: str, ratio: float | None, is_wrong: bool, detail: str) -> None:
        """Adds a comparison whose difference is `ratio` times its limit."""
        if ratio is None and not is_wrong:
            self.without_numbers.append(label)
            return
        self.compared += 1
        if is_wrong or (ratio is not None and ratio > 1):
            self.differing.append(f"{label} ({detail})" if detail else label)
        else:
            self.agreeing += 1


def claims(results: Record) -> list[Claim]:
    """All claims: by part, then hangs and cases that were not run.

    Args:
      results: gpu_day.json.
    """
    where = f" on {device(results)}"
    found = _losses(results, where)
    kernels = _Sentence("The kernels", "agree", "do not all agree", f"with their references within the limits{where}")
    texts = _Sentence("Generated texts", "equal", "do not all equal", f"the reference's{where}")
    found.append(_comparison(kernels, cases(results, "kernels"), _count_kernels, ("row", "rows")))
    found.append(_comparison(texts, cases(results, "generation"), _count_texts, ("text", "texts")))
    resumed = cases(results, "checkpoint")
    checkpoint = _Sentence(
        "Training resumed from a checkpoint",
        "gives",
        "does not always give",
        f"the losses of the reference{_limits(resumed)}{where}",
    )
    found.append(_comparison(checkpoint, resumed, _count_losses, ("case", "cases")))
    found += _rates(results, where) + _steps(results, where)
    for part in parts(results):
        if part not in ("losses", "kernels", "generation", "checkpoint"):
            found += _failures(part, cases(results, part))
    return [*found, _hangs(results), *_not_run(results)]


def _losses(results: Record, where: str) -> list[Claim]:
    """A claim for each precision, which is read from the cases' names."""
    groups: dict[str, list[Record]] = {}
    for case in cases(results, "losses"):
        precision = " and ".join(dict.fromkeys(PRECISION.findall(name(case))))
        groups.setdefault(f"Training in {precision}" if precision else "Training", []).append(case)
    return [
        _comparison(
            _Sentence(subject, "gives", "does not always give", f"the CPU's losses{_limits(group)}{where}"),
            group,
            _count_losses,
            ("case", "cases"),
        )
        for subject, group in (groups or {"Training": []}).items()
    ]


def _limits(group: Sequence[Record]) -> str:
    """The limits of the group's cases: " within 1e-4"."""
    found = sorted({one for case in group if (one := number(record(case.get("result")).get("limit"))) is not None})
    return f" within {' to '.join(scientific(one) for one in dict.fromkeys((found[0], found[-1])))}" if found else ""


def _comparison(
    sentence: _Sentence, group: Sequence[Record], count: Callable[[_Count, Record], None], unit: tuple[str, str]
) -> Claim:
    """The claim of cases that compare results with references.

    Args:
      sentence: the claim, and its denial.
      group: the cases.
      count: adds the comparisons of a finished case.
      unit: what is counted, singular and plural.
    """
    found, failed = _Count(), _failed(group)
    for case in group:
        if status(case) in FINISHED:
            count(found, case)
    ended = [*[f"Differs: {one}." for one in found.differing], *failed]
    if found.without_numbers:
        ended.append(f"Without numbers: {', '.join(found.without_numbers)}.")
    ended += [f"Not run: {', '.join(skipped)}."] if (skipped := _named(group, "not run")) else []
    if not found.compared and not failed:
        subject = f"{sentence.subject[0].lower()}{sentence.subject[1:]}"
        return Claim(None, " ".join([f"Not measured: whether {subject} {sentence.verb} {sentence.object}.", *ended]))
    holds = not found.differing and not failed
    total = found.compared + (len(failed) if unit[0] == "case" else 0)  # of other units nobody knows how many failed
    text = f"{sentence.subject} {sentence.verb if holds else sentence.denial} {sentence.object}"
    text += f": {found.agreeing} of {counted(total, *unit)}"
    if holds and found.ratios:
        text += f"; the largest difference is {decimal(max(found.ratios), 2)} times its limit"
    return Claim(holds, " ".join([f"{text}.", *ended]))


def _count_losses(found: _Count, case: Record) -> None:
    result = record(case.get("result"))
    difference, limit = result.get("difference"), result.get("limit")
    ratio = relative(difference, limit)
    detail = "" if ratio is None else f"difference {scientific(difference)}, limit {scientific(limit)}"
    found.add(name(case), ratio, status(case) == "wrong", detail or str(case.get("reason") or ""))
    if ratio is not None:
        found.ratios.append(ratio)


def _count_kernels(found: _Count, case: Record) -> None:
    table = rows(case)
    ratios = [kernel_ratio(row) for row in table]
    for row, ratio in zip(table, ratios, strict=True):
        errors = ", ".join(f"{key} {one}" for key in KERNEL_ERRORS if (one := scientific(row.get(key))))
        found.add(f"{name(case)}: {row.get('label') or 'unnamed'}", ratio, False, errors)
    found.ratios += [one for one in ratios if one is not None]
    exceeds = (largest(ratios) or 0) > 1
    if not exceeds and (status(case) == "wrong" or not table):  # what the rows do not show, the status does
        found.add(name(case), None, status(case) == "wrong", str(case.get("reason") or ""))


def _count_texts(found: _Count, case: Record) -> None:
    result = record(case.get("result"))
    texts, equal = (number(result.get(key)) for key in ("texts", "equal"))
    is_wrong = status(case) == "wrong"
    if not texts or equal is None or not math.isfinite(texts + equal):
        return found.add(name(case), None, is_wrong, str(case.get("reason") or ""))
    found.compared += round(texts)
    found.agreeing += round(equal)
    if equal < texts or is_wrong:
        found.differing.append(f"{name(case)} ({decimal(equal)} of {decimal(texts)} equal)")


def _rates(results: Record, where: str) -> list[Claim]:
    """For each case the highest rate of each implementation."""
    found = []
    for case in _usable(results, "rates"):
        values: dict[str, list[float | None]] = {}
        for row in rows(case):
            for implementation, value in record(row.get("values")).items():
                values.setdefault(implementation, []).append(positive(value))
        unit = record(case.get("result")).get("unit") or ""
        best = {one: largest(several) for one, several in values.items()}
        texts = [f"{one} {decimal(value)} {unit}".rstrip() for one, value in best.items() if value is not None]
        missing = [
            f"{one} could not run {several.count(None)} of {len(several)} shapes"
            for one, several in values.items()
            if None in several
        ]
        shapes = counted(len(rows(case)), "shape")
        text = "; ".join([f"highest rate of {shapes}{where}: {', '.join(texts)}" if texts else "no rate", *missing])
        found.append(Claim(True if texts else None, f"{name(case)}: {text}."))
    return found or [Claim(None, "Not measured: rates of matrix multiplications and copies.")]


def _steps(results: Record, where: str) -> list[Claim]:
    """Throughput of each row of megajax relative to other implementations, and the errors of predictions."""
    table = [row for case in _usable(results, "steps") for row in rows(case)]
    found = []
    for label in dict.fromkeys(str(row.get("label") or "unnamed") for row in table):
        group = [row for row in table if str(row.get("label") or "unnamed") == label]
        ours = [row for row in group if _implementation(row).startswith(OURS) and is_measured(row)]
        others = [row for row in group if not _implementation(row).startswith(OURS)]
        found += [_throughput(label, row, others, where) for row in ours]
        if not ours:
            found.append(Claim(None, f"{label}: the step of {OURS} was not measured."))
    if not table:
        found.append(Claim(None, "Not measured: throughput and MFU of training steps."))
    slow = [name(case) for case in cases(results, "steps") if status(case) == "slow"]
    times = _predictions("Step times", table, ("milliseconds", "predicted_milliseconds"), where)
    if slow:
        text = f"More than {SLOW_FACTOR:g} times the predicted time: {', '.join(slow)}."
        times = Claim(False, text if times.holds is None else f"{times.text} {text}")
    peaks = _predictions("Peak memory", table, ("peak_gigabytes", "predicted_peak_gigabytes"), where)
    return [*found, times, peaks]


def _implementation(row: Record) -> str:
    return str(row.get("implementation") or "unnamed")


def _throughput(label: str, row: Record, others: Sequence[Record], where: str) -> Claim:
    """Such as "gpt2-xl b4: 54.8% MFU (542.4 TFLOP/s) on NVIDIA H200; 1.05 times the throughput of plain JAX."."""
    mfu, rate = share(row.get("mfu")), decimal(row.get("teraflops"))
    figures = f"{mfu} MFU ({rate} TFLOP/s)" if mfu and rate else f"{mfu} MFU" if mfu else f"{rate} TFLOP/s"
    if not mfu and not rate:
        figures = f"{decimal(row.get('milliseconds'))} ms a step"
    own = "" if _implementation(row) == OURS else f", {_implementation(row)}"
    ratios = [
        f"{ratio:.2f} times the throughput of {_implementation(other)}"
        for other in others
        if (ratio := speedup(row, other)) is not None
    ]
    compared = f"; {', '.join(ratios)}" if ratios else ""
    return Claim(True, f"{label}{own}: {figures}{where}{compared}.")


def _predictions(what: str, table: Sequence[Record], keys: tuple[str, str], where: str) -> Claim:
    """The median and largest error of predictions; False if one is off by more than `SLOW_FACTOR`, either way."""
    errors = {}
    for index, row in enumerate(table):
        error = prediction_error(row, *keys)
        if error is not None:
            errors[f"{row.get('label') or 'unnamed'}, {_implementation(row)}", index] = error
    if not errors:
        return Claim(None, f"Not measured: the error of predicted {what[0].lower()}{what[1:]}.")
    worst = max(errors, key=lambda one: abs(errors[one]))
    median = statistics.median(abs(one) for one in errors.values())
    far = [label for (label, _), error in errors.items() if not 1 / SLOW_FACTOR <= 1 + error <= SLOW_FACTOR]
    verb = "is" if what == "Peak memory" else "are"
    text = (
        f"{what} {verb} predicted with a median error of {share(median)} and a largest error of "
        f"{share(abs(errors[worst]))} ({worst[0]}), over {counted(len(errors), 'measurement')}{where}."
    )
    if far:
        text += f" Off by more than a factor of {SLOW_FACTOR:g}: {', '.join(dict.fromkeys(far))}."
    return Claim(not far, text)


def _usable(results: Record, part: str) -> list[Record]:
    """The cases whose numbers may be claimed: those that finished, and were not wrong."""
    return [case for case in cases(results, part) if status(case) in ("passed", "slow")]


def _named(group: Sequence[Record], which: str) -> list[str]:
    return [name(case) for case in group if status(case) == which]


def _failed(group: Sequence[Record]) -> list[str]:
    """A sentence for each case that ended without complete results."""
    failed = [case for case in group if status(case) not in (*FINISHED, "not run")]
    return [
        f"{status(case).capitalize()}: {name(case)}{f' ({reason})' if (reason := case.get('reason')) else ''}."
        for case in failed
    ]


def _failures(part: str, group: Sequence[Record]) -> list[Claim]:
    """The cases of a part that failed or are wrong, where no sentence about comparisons names them."""
    wrong = [f"Wrong: {one}." for one in _named(group, "wrong")]
    failed = [*wrong, *_failed(group)]
    if not failed:
        return []
    text = f"{PARTS.get(part, part)}: {len(failed)} of {counted(len(group), 'case')} failed."
    return [Claim(False, " ".join([text, *failed]))]


def _hangs(results: Record) -> Claim:
    ran = [case for case in cases(results) if status(case) != "not run"]
    hung = _named(ran, "hang")
    if not ran:
        return Claim(None, "Not measured: hangs. No case ran.")
    if hung:
        return Claim(False, f"{counted(len(hung), 'case')} hung: {', '.join(hung)}.")
    return Claim(True, f"Nothing hung: {counted(len(ran), 'case')} ended before the deadline.")


def _not_run(results: Record) -> list[Claim]:
    skipped = _named(cases(results), "not run")
    if not skipped:
        return []
    return [Claim(None, f"Not run: {counted(len(skipped), 'case')}: {', '.join(skipped)}.")]

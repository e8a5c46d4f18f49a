"""What a run of benchmarks.gpu_day shows: the sentences that the README may claim, and those that it may not.

The sentences are computed from the numbers and statuses alone. A case that is marked as passed and whose numbers exceed
their limit, or are missing, does not support a claim.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.gpu_day.values import (
    COMPILER,
    PARTS,
    SLOW_FACTOR,
    Case,
    Record,
    by_part,
    cases,
    decimal,
    device,
    is_measured,
    kernel_ratio,
    largest,
    number,
    positive,
    prediction_error,
    record,
    scientific,
    share,
    speedup,
)
from megajax.schedules.errors import counted

PRECISION = re.compile(r"\b(?:fp32|tf32|bf16|fp16|fp8)\b")
OURS = "megajax"
FINISHED = ("passed", "slow", "wrong")  # statuses of cases whose numbers are complete
COMPARED = ("losses", "kernels", "generation", "checkpoint")  # parts whose cases compare with a reference
KERNEL_ERRORS = ("output", "gradients", "limit")
GIVES = ("gives", "does not always give")


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
class _Compared:
    """A case, or a part of it, compared with its reference.

    Attributes:
      label, detail: its name, and the numbers or the reason if it differs.
      differs: whether it contradicts the claim.
      agreeing, compared: of its numbers or texts; 0 are compared if there are none.
      ratio: the difference relative to its limit.
    """

    label: str
    detail: str
    differs: bool
    agreeing: int
    compared: int
    ratio: float | None = None


def claims(results: Record) -> list[Claim]:
    """All claims: by part, then hangs and cases that were not run.

    Args:
      results: gpu_day.json.
    """
    where, everything = f" on {device(results)}", cases(results)
    groups = by_part(everything)
    losses, kernels, texts, resumed, rates, steps, _ = (groups.get(part, []) for part in PARTS)
    if record(results.get("device")).get("platform") == COMPILER:
        return [_compiled(everything, device(results)), _hangs(everything), *_not_run(everything)]
    within = f"with their references within the limits{where}"
    after = f"the losses of the reference{_limits(resumed)}{where}"
    found = [
        *_losses(losses, where),
        _comparison("The kernels", ("agree", "do not all agree"), within, kernels, _of_kernels, "row"),
        _comparison(
            "Generated texts", ("equal", "do not all equal"), f"the reference's{where}", texts, _of_texts, "text"
        ),
        _comparison("Training resumed from a checkpoint", GIVES, after, resumed, _of_losses, "case"),
        *_rates(rates, where),
        *_steps(steps, where),
    ]
    for part, group in groups.items():
        if part not in COMPARED:
            found += _failures(part, group)
    return [*found, _hangs(everything), *_not_run(everything)]


def _compiled(everything: Sequence[Case], gpu: str) -> Claim:
    """Whether the programs of all cases compile."""
    programs = [row for case in everything for row in case.rows]
    refused = [f"{case.name} ({row['label']})" for case in everything for row in case.rows if row.get("problem")]
    failed = _failed([case for case in everything if not case.rows])
    count = f"{len(programs) - len(refused)} of {counted(len(programs), 'program')}"
    text = f"For {gpu}, {count} of {counted(len(everything), 'case')} compile; nothing was run."
    ended = [f"Refused: {', '.join(refused)}."] if refused else []
    holds = None if not programs and not failed else not refused and not failed
    return Claim(holds, " ".join([text, *ended, *failed]))


def _losses(group: Sequence[Case], where: str) -> list[Claim]:
    """A claim for each precision, which is read from the cases' names."""
    groups: dict[str, list[Case]] = {}
    for case in group:
        precision = " and ".join(dict.fromkeys(PRECISION.findall(case.name)))
        groups.setdefault(f"Training in {precision}" if precision else "Training", []).append(case)
    return [
        _comparison(subject, GIVES, f"the CPU's losses{_limits(some)}{where}", some, _of_losses, "case")
        for subject, some in (groups or {"Training": []}).items()
    ]


def _limits(group: Sequence[Case]) -> str:
    """The limits of the group's cases: " within 1e-4"."""
    found = sorted(one for case in group if (one := number(case.result.get("limit"))) is not None)
    return f" within {' to '.join(scientific(one) for one in dict.fromkeys((found[0], found[-1])))}" if found else ""


def _comparison(
    subject: str,
    verbs: tuple[str, str],
    reference: str,
    group: Sequence[Case],
    compare: Callable[[Case], Iterable[_Compared]],
    unit: str,
) -> Claim:
    """The claim "SUBJECT VERB REFERENCE" about cases that compare results with references.

    Args:
      subject: of the sentence.
      verbs: the claim's, and its denial's.
      reference: what the results are compared with.
      group: the cases.
      compare: the comparisons of a finished case.
      unit: what is counted.
    """
    found = [one for case in group if case.status in FINISHED for one in compare(case)]
    differing, failed = [one for one in found if one.differs], _failed(group)
    ended = [f"Differs: {one.label}{f' ({one.detail})' if one.detail else ''}." for one in differing] + failed
    if missing := [one.label for one in found if not one.compared]:
        ended.append(f"Without numbers: {', '.join(missing)}.")
    if skipped := _named(group, "not run"):
        ended.append(f"Not run: {', '.join(skipped)}.")
    total = sum(one.compared for one in found)
    if not total and not failed:
        start = f"{subject[0].lower()}{subject[1:]}"
        return Claim(None, " ".join([f"Not measured: whether {start} {verbs[0]} {reference}.", *ended]))
    holds = not differing and not failed
    total += len(failed) if unit == "case" else 0  # of other units nobody knows how many failed
    agreeing = sum(one.agreeing for one in found)
    text = f"{subject} {verbs[0 if holds else 1]} {reference}: {agreeing} of {counted(total, unit)}"
    if holds and (ratio := largest(one.ratio for one in found)) is not None:
        text += f"; the largest difference is {decimal(ratio, 2)} times its limit"
    return Claim(holds, " ".join([f"{text}.", *ended]))


def _number(label: str, ratio: float | None, is_wrong: bool, detail: str) -> _Compared:
    """A comparison of numbers whose difference is `ratio` times its limit; or by its status alone, without a ratio."""
    differs = is_wrong or (ratio is not None and ratio > 1)
    compared = differs or ratio is not None
    return _Compared(label, detail, differs, int(compared and not differs), int(compared), ratio)


def _of_losses(case: Case) -> Iterable[_Compared]:
    difference, limit = (scientific(case.result.get(key)) for key in ("difference", "limit"))
    detail = case.reason if case.ratio is None else f"difference {difference}, limit {limit}"
    yield _number(case.name, case.ratio, case.status == "wrong", detail)


def _of_kernels(case: Case) -> Iterable[_Compared]:
    for row in case.rows:
        errors = ", ".join(f"{key} {one}" for key in KERNEL_ERRORS if (one := scientific(row.get(key))))
        yield _number(f"{case.name}: {row['label']}", kernel_ratio(row), False, errors)
    exceeds = (largest(map(kernel_ratio, case.rows)) or 0) > 1
    if not exceeds and (case.status == "wrong" or not case.rows):  # what the rows do not show, the status does
        yield _number(case.name, None, case.status == "wrong", case.reason)


def _of_texts(case: Case) -> Iterable[_Compared]:
    texts, equal = (number(case.result.get(key)) for key in ("texts", "equal"))
    is_wrong = case.status == "wrong"
    if not texts or equal is None or not math.isfinite(texts + equal):
        yield _number(case.name, None, is_wrong, case.reason)
    else:
        detail = f"{decimal(equal)} of {decimal(texts)} equal"
        yield _Compared(case.name, detail, equal < texts or is_wrong, round(equal), round(texts))


def _rates(group: Sequence[Case], where: str) -> list[Claim]:
    """For each case the highest rate of each implementation."""
    found = []
    for case in _usable(group):
        if "table" in case.result:
            continue  # of a calibration, with rates of its own
        values: dict[str, list[float | None]] = {}
        for row in case.rows:
            for implementation, value in record(row.get("values")).items():
                values.setdefault(implementation, []).append(positive(value))
        unit = case.result.get("unit") or ""
        best = {one: largest(several) for one, several in values.items()}
        texts = [f"{one} {decimal(value)} {unit}".rstrip() for one, value in best.items() if value is not None]
        missing = [
            f"{one} could not run {several.count(None)} of {len(several)} shapes"
            for one, several in values.items()
            if None in several
        ]
        rate = f"highest rate of {counted(len(case.rows), 'shape')}{where}: {', '.join(texts)}" if texts else "no rate"
        found.append(Claim(True if texts else None, f"{case.name}: {'; '.join([rate, *missing])}."))
    return found or [Claim(None, "Not measured: rates of matrix multiplications and copies.")]


def _steps(group: Sequence[Case], where: str) -> list[Claim]:
    """Throughput of each row of megajax relative to other implementations, and the errors of predictions."""
    labels: dict[str, list[Record]] = {}
    for case in _usable(group):
        for row in case.rows:
            labels.setdefault(row["label"], []).append(row)
    found = []
    for label, some in labels.items():
        ours = [row for row in some if row["implementation"].startswith(OURS) and is_measured(row)]
        others = [row for row in some if not row["implementation"].startswith(OURS)]
        found += [_throughput(row, others, where) for row in ours]
        if not ours:
            found.append(Claim(None, f"{label}: the step of {OURS} was not measured."))
    if not labels:
        found.append(Claim(None, "Not measured: throughput and MFU of training steps."))
    table = [row for case in _usable(group) for row in case.rows]
    times = _predictions("Step times", "are", table, ("milliseconds", "predicted_milliseconds"), where)
    if slow := _named(group, "slow"):
        text = f"More than {SLOW_FACTOR:g} times the predicted time: {', '.join(slow)}."
        times = Claim(False, text if times.holds is None else f"{times.text} {text}")
    return [
        *found,
        times,
        _predictions("Peak memory", "is", table, ("peak_gigabytes", "predicted_peak_gigabytes"), where),
    ]


def _throughput(row: Record, others: Sequence[Record], where: str) -> Claim:
    """Such as "gpt2-xl b4: 54.8% MFU (542.4 TFLOP/s) on NVIDIA H200; 1.05 times the throughput of plain JAX."."""
    mfu, rate = share(row.get("mfu")), decimal(row.get("teraflops"))
    figures = f"{mfu} MFU ({rate} TFLOP/s)" if mfu and rate else f"{mfu} MFU" if mfu else f"{rate} TFLOP/s"
    if not mfu and not rate:
        figures = f"{decimal(row.get('milliseconds'))} ms a step"
    own = "" if row["implementation"] == OURS else f", {row['implementation']}"
    ratios = [
        f"{ratio:.2f} times the throughput of {other['implementation']}"
        for other in others
        if (ratio := speedup(row, other)) is not None
    ]
    compared = f"; {', '.join(ratios)}" if ratios else ""
    return Claim(True, f"{row['label']}{own}: {figures}{where}{compared}.")


def _predictions(what: str, verb: str, table: Sequence[Record], keys: tuple[str, str], where: str) -> Claim:
    """The median and largest error of predictions; False if one is off by more than `SLOW_FACTOR`, either way."""
    errors = [
        (error, f"{row['label']}, {row['implementation']}")
        for row in table
        if (error := prediction_error(row, *keys)) is not None
    ]
    if not errors:
        return Claim(None, f"Not measured: the error of predicted {what[0].lower()}{what[1:]}.")
    worst, label = max(errors, key=lambda one: abs(one[0]))
    median = statistics.median(abs(error) for error, _ in errors)
    text = (
        f"{what} {verb} predicted with a median error of {share(median)} and a largest error of {share(abs(worst))} "
        f"({label}), over {counted(len(errors), 'measurement')}{where}."
    )
    far = [label for error, label in errors if not 1 / SLOW_FACTOR <= 1 + error <= SLOW_FACTOR]
    if far:
        text += f" Off by more than a factor of {SLOW_FACTOR:g}: {', '.join(dict.fromkeys(far))}."
    return Claim(not far, text)


def _usable(group: Sequence[Case]) -> list[Case]:
    """The cases whose numbers may be claimed: those that finished, and were not wrong."""
    return [case for case in group if case.status in ("passed", "slow")]


def _named(group: Sequence[Case], status: str) -> list[str]:
    return [case.name for case in group if case.status == status]


def _failed(group: Sequence[Case]) -> list[str]:
    """A sentence for each case that ended without complete results."""
    return [
        f"{case.status.capitalize()}: {case.name}{f' ({case.reason})' if case.reason else ''}."
        for case in group
        if case.status not in (*FINISHED, "not run")
    ]


def _failures(part: str, group: Sequence[Case]) -> list[Claim]:
    """The cases of a part that failed or are wrong, where no sentence about comparisons names them."""
    failed = [*(f"Wrong: {one}." for one in _named(group, "wrong")), *_failed(group)]
    text = f"{PARTS.get(part, part)}: {len(failed)} of {counted(len(group), 'case')} failed."
    return [Claim(False, " ".join([text, *failed]))] if failed else []


def _hangs(everything: Sequence[Case]) -> Claim:
    ran = [case for case in everything if case.status != "not run"]
    hung = _named(ran, "hang")
    if not ran:
        return Claim(None, "Not measured: hangs. No case ran.")
    if hung:
        return Claim(False, f"{counted(len(hung), 'case')} hung: {', '.join(hung)}.")
    return Claim(True, f"Nothing hung: {counted(len(ran), 'case')} ended before the deadline.")


def _not_run(everything: Sequence[Case]) -> list[Claim]:
    skipped = _named(everything, "not run")
    return [Claim(None, f"Not run: {counted(len(skipped), 'case')}: {', '.join(skipped)}.")] if skipped else []

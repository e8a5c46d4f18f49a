"""The results of benchmarks/mfu.py as a table, a plot and JSON."""

import itertools
import json
import pathlib
from collections.abc import Sequence

from benchmarks.tables import grouped
from megajax.schedules.errors import UserError
from megajax.schedules.pictures import COLOURS, picture

ON_CPU = (
    "CPU devices share the machine's cores: only ratios are meaningful, and they compare compute, not idle time. A rank "
    "that idles costs nothing here unless it computes in its bubble, and sends are memory copies."
)


def read(path: pathlib.Path) -> dict:
    """The results of a .json file that `write` has written; raises UserError for another file, or none."""
    try:
        results = json.loads(path.read_text())
        results["device"], results["rows"]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} has no results of benchmarks.mfu: pass the .json that it wrote") from error
    return results


def write(results: dict, folder: pathlib.Path, name: str) -> None:
    """Prints the table, and writes NAME.json, NAME.txt and NAME.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    text = table(results)
    print(text)
    (folder / f"{name}.txt").write_text(text + "\n")
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, folder / f"{name}.svg")
    print(f"written: {folder / name}.json, .txt and .svg")


def table(results: dict) -> str:
    """All rows, sweep by sweep, with the device and the package versions."""
    device, ceilings, peak = results["device"], results["ceilings"], results["peak"]
    lines = [
        f"$ {results['command']}",
        f"{device['count']} {device['kind']} devices, {device['cores']} cores; "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    ]
    if peak:
        lines.append(
            f"peak {peak['flops'] / 1e12:.1f} TFLOP/s ({peak['source']}); measured ceilings: matrix multiplication "
            f"{ceilings['matmul_flops'] / 1e12:.1f} TFLOP/s, copy {ceilings['copy_bytes'] / 1e9:.0f} GB/s"
        )
    else:
        lines.append(ON_CPU)
    for sweep, rows in grouped(results["rows"], lambda one: one["sweep"]).items():
        model = rows[0]["run"]["model"]
        lines += [
            "",
            f"{sweep}: {model['layers']} layers of h = {model['hidden']}, {model['heads']} heads, "
            f"{model['sequence_length']} tokens a sample, vocabulary {model['vocabulary']}, "
            f"{rows[0]['run']['train']['precision']}, attention {rows[0]['run']['parallel']['attention']}",
            _HEAD + (_GPU_HEAD if peak else f"{'of the best':>13}"),
        ]
        best = max((one["tokens_per_second"] or 0 for one in rows), default=0)
        for one in rows:
            lines.append(_line(one, bool(peak), best))
            lines += [
                _line(peer, bool(peak), best) for peer in results.get("peers", []) if peer["label"] == one["label"]
            ]
    several = [peer.get("versions", {}).items() for peer in results.get("peers", [])]
    if found := sorted(dict(itertools.chain.from_iterable(several)).items()):
        lines += ["", "peers: " + ", ".join(f"{name} {version}" for name, version in found)]
    return "\n".join(lines)


_HEAD = (
    f"{'':<26}{'d':>3}{'p':>3}{'t':>3}{'v':>3}{'b':>3}{'m':>4}  {'schedule':<18}{'recompute':<10}"
    f"{'ms a step':>10}{'tokens/s':>11}"
)
_GPU_HEAD = (
    f"{'TFLOP/s':>10}{'MFU':>8}{'causal':>8}{'of ceiling':>12}"  # causal: MFU with that half of attention's scores
)


def _line(one: dict, on_gpu: bool, best: float) -> str:
    """A row; a peer's row follows the run of the same shape."""
    if "peer" in one:
        line = f"  {one['peer']:<24}{'':<49}"
    else:
        parallel, batch = one["run"]["parallel"], one["run"]["train"]["global_batch_size"]
        samples = parallel["microbatch_size"]
        line = (
            f"{one['label']:<26}{parallel['data']:>3}{parallel['pipe']:>3}{parallel['tensor']:>3}{parallel['chunks']:>3}"
            f"{samples:>3}{batch // samples // parallel['data']:>4}  {parallel['schedule']:<18}{parallel['recompute']:<10}"
        )
    if not one.get("tokens_per_second"):
        return f"{line}  {one.get('error', 'out of memory')}"
    line += f"{1e3 * one['seconds']:>10.1f}{one['tokens_per_second']:>11,.0f}"
    if not on_gpu:
        return line + f"{one['tokens_per_second'] / best:>13.2f}"
    mfu, causal = f"{one['mfu']:>8.1%}", f"{one['mfu_causal']:>8.1%}"
    return f"{line}{one['teraflops_per_device']:>10.1f}{mfu}{causal}{one['share_of_ceiling']:>12.1%}"


def plot(results: dict, path: pathlib.Path) -> None:
    """A panel of bars for each sweep: MFU, or on a CPU the throughput as a share of the sweep's best."""
    sweeps = grouped(results["rows"], lambda one: one["sweep"])
    heights = [len(_bars(rows, results)) + 1 for rows in sweeps.values()]
    with picture(path, 470, 40 + 26 * len(sweeps) + 15 * sum(heights)) as figure:
        panels = figure.subplots(len(sweeps), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for panel, (sweep, rows) in zip(panels, sweeps.items(), strict=True):
            bars = _bars(rows, results)
            colours = [COLOURS[4] if peer else COLOURS[0] for *_, peer in bars]
            drawn = panel.barh(range(len(bars)), [value for _, value, _ in bars], color=colours)
            panel.bar_label(drawn, fmt="{:.1%}" if results["peak"] else "{:.2f}", padding=3, fontsize=8)
            panel.set_yticks(range(len(bars)), [name for name, *_ in bars])
            panel.tick_params(axis="y", length=0)
            panel.grid(visible=False)
            panel.invert_yaxis()
            panel.set_title(sweep)
        panels[-1].set_xlim(0, 1.1 * max(panel.dataLim.xmax for panel in panels))
        unit = "MFU" if results["peak"] else "throughput, as a share of the best of its panel"
        panels[-1].set_xlabel(f"{unit}; {results['device']['kind']}")


def _bars(rows: Sequence[dict], results: dict) -> list[tuple[str, float, bool]]:
    """(name, length, whether it is a peer's) of the rows that have a measurement."""
    best = max((one["tokens_per_second"] or 0 for one in rows), default=0)
    length = lambda one: one["mfu"] if results["peak"] else one["tokens_per_second"] / best  # noqa: E731
    bars = []
    for one in rows:
        peers = [peer for peer in results.get("peers", []) if peer["label"] == one["label"]]
        several = [(one["label"], one, False), *((f"{peer['peer']}, {peer['label']}", peer, True) for peer in peers)]
        bars += [(name, length(each), peer) for name, each, peer in several if each.get("tokens_per_second")]
    return bars

"""The page and the verdict of benchmarks.gpu_day, on results made by hand with a failure of each kind."""

import copy
import math
import re
from html.parser import HTMLParser

import pytest

from benchmarks.gpu_day import page
from benchmarks.gpu_day.values import by_part, cases, decimal, relative, scientific, speedup
from benchmarks.gpu_day.verdict import Claim, claims

VOID = {"meta"}
KEYS = (  # of the results, other than names that a case chooses
    *(
        "platform",
        "kind",
        "count",
        "runtime",
        "processor",
        "cores",
        "rows",
        "label",
        "values",
        "unit",
        "texts",
        "equal",
    ),
    *("command", "reference_command", "losses", "reference", "difference", "limit", "output", "gradients"),
    *("first_difference", "implementation", "milliseconds", "predicted_milliseconds", "rounds", "by_class", "measured"),
    *("predicted", "tokens_per_second", "teraflops", "mfu", "mfu_causal", "peak_gigabytes", "predicted_peak_gigabytes"),
)


def case(part, name, result=None, status="passed", reason="", seconds=18.25):
    return {"name": name, "part": part, "status": status, "reason": reason, "seconds": seconds, "result": result}


def losses(name, difference=1.23e-5, limit=1e-4, **other):
    reference = [5.5701, 4.8312, 4.2107, 3.9023]
    command = f"python -m experiments.gpt3 --run {name.replace(' ', '-')}"
    result = {"command": command, "losses": [one + difference for one in reference], "reference": reference}
    result |= {"reference_command": f"{command} --on-cpu", "difference": difference, "limit": limit}
    return case("losses", name, result, **other)


def kernel(label, output=2.1e-3, gradients=4.2e-3, limit=1e-2):
    return {"label": label, "output": output, "gradients": gradients, "limit": limit}


def step(label, implementation, milliseconds, mfu, predicted=None, **other):
    row = {
        "label": label,
        "implementation": implementation,
        "milliseconds": milliseconds,
        "rounds": [milliseconds - 0.3, milliseconds, milliseconds + 0.4],
        "predicted_milliseconds": predicted,
        "tokens_per_second": 65536000 / milliseconds,
        "teraflops": 990 * mfu,
        "mfu": mfu,
        "mfu_causal": mfu * 0.9,
        "peak_gigabytes": None,
        "predicted_peak_gigabytes": None,
        "by_class": None,
    }
    return row | other


def example():
    """A run in which everything passed."""
    classes = {"matmul": {"measured": 400.1, "predicted": 390.2}, "attention": {"measured": 97.3, "predicted": None}}
    steps = [
        step("gpt2-xl b4", "megajax", 784.5, 0.548, 760.2, by_class=classes)
        | {"peak_gigabytes": 88.1, "predicted_peak_gigabytes": 86.3},
        step("gpt2-xl b4", "plain JAX", 823.7, 0.522),
        step("gpt2-xl b4", "torch.compile", 862.9, 0.498),
        step("llama 1b b2", "megajax", 312.6, 0.511, 343.9),
    ]
    run = {"losses": [2.5, 2.25], "reference": [2.5, 2.25], "difference": 0.0, "limit": 1e-4}
    rates = [
        {"label": "2048 x 4096 x 16384", "values": {"jax": 612.3, "torch": 640.1}},
        {"label": "8192 x 8192 x 8192", "values": {"jax": 701.4, "torch": None}},
    ]
    return {
        "command": "python -m benchmarks.gpu_day",
        "started": "2026-11-26T07:30:00+00:00",
        "device": {
            **{"platform": "gpu", "kind": "NVIDIA H200", "count": 1},
            **{"runtime": ["CUDA 13.1", "driver 590.44"], "processor": "x86_64", "cores": 16},
        },
        "versions": {"python": "3.12.3", "megajax": "0.1.0", "jax": "0.12.0.1"},
        "cases": [
            losses("losses fp32 recompute full"),
            losses("losses fp32 recompute none", 3.4e-6),
            losses("losses fp32 schedule zb_v", 2.2e-8),
            losses("losses fp32 chunks 2", 8.8e-7),
            losses("losses bf16 cudnn", 7.6e-3, 3e-2),
            case("kernels", "kernels cudnn", {"rows": [kernel("cudnn bf16 d 128 causal"), kernel("cudnn fp16 d 64")]}),
            case("generation", "generation gpt2", {"texts": 4, "equal": 4, "first_difference": None}),
            case("checkpoint", "checkpoint resume", run),
            case("rates", "rates bf16 matmul", {"unit": "TFLOP/s", "rows": rates}),
            case("steps", "steps gpt2-xl", {"rows": steps}),
        ],
    }


@pytest.fixture
def results():
    return example()


def find(results, name):
    return next(one for one in results["cases"] if one["name"] == name)


def texts(results, holds):
    return [one.text for one in claims(results) if one.holds is holds]


class Page(HTMLParser):
    """Checks that tags nest; collects attributes, the text of each section, and rows of tables."""

    def __init__(self, html):
        super().__init__()
        self.open, self.attributes, self.sections, self.rows, self.section = [], [], {}, [], ""
        self.feed(html)
        self.close()
        assert not self.open
        self.text = " ".join(self.sections.values())

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag == "section":
            self.section = dict(attributes)["id"]
        if tag == "tr":
            self.rows.append((self.section, []))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        raise AssertionError(f"<{tag}/>")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.sections[self.section] = f"{self.sections.get(self.section, '')} {data}"
        if self.open and "tr" in self.open:
            self.rows[-1][1].append(data)

    def rows_with(self, section, word):
        return [row for where, row in self.rows if where == section and word in row]


def test_all_passed(results):
    where = "on NVIDIA H200"
    assert texts(results, None) == texts(results, False) == []
    assert texts(results, True) == [
        f"Training in fp32 gives the CPU's losses within 1e-4 {where}: 4 of 4 cases; the largest difference is 0.12 "
        "times its limit.",
        f"Training in bf16 gives the CPU's losses within 3e-2 {where}: 1 of 1 case; the largest difference is 0.25 "
        "times its limit.",
        f"The kernels agree with their references within the limits {where}: 2 of 2 rows; the largest difference is "
        "0.42 times its limit.",
        f"Generated texts equal the reference's {where}: 4 of 4 texts.",
        f"Training resumed from a checkpoint gives the losses of the reference within 1e-4 {where}: 1 of 1 case; the "
        "largest difference is 0 times its limit.",
        f"rates bf16 matmul: highest rate of 2 shapes {where}: jax 701.4 TFLOP/s, torch 640.1 TFLOP/s; torch could not "
        "run 1 of 2 shapes.",
        f"gpt2-xl b4: 54.8% MFU (542.5 TFLOP/s) {where}; 1.05 times the throughput of plain JAX, 1.10 times the "
        "throughput of torch.compile.",
        f"llama 1b b2: 51.1% MFU (505.9 TFLOP/s) {where}.",
        "Step times are predicted with a median error of 6.6% and a largest error of 10.0% (llama 1b b2, megajax), "
        f"over 2 measurements {where}.",
        "Peak memory is predicted with a median error of 2.0% and a largest error of 2.0% (gpt2-xl b4, megajax), over "
        f"1 measurement {where}.",
        "Nothing hung: 10 cases ended before the deadline.",
    ]


def test_the_page_is_one_file_with_all_numbers(results, tmp_path):
    page.write(results, tmp_path / "day.html")
    html = (tmp_path / "day.html").read_text()
    assert list(tmp_path.iterdir()) == [tmp_path / "day.html"] and html == page.page(results)
    found = Page(html)
    loading = {"src", "href", "xlink:href", "srcset", "data", "action"}
    assert not [one for one in found.attributes if one[1] in loading or one[0] in ("script", "link", "iframe", "img")]
    assert "http" not in html and "url(" not in html and "@import" not in html
    assert list(found.sections)[1:] == ["verdict", "cases", *by_part(cases(results)), "commands"]
    assert "1 × NVIDIA H200" in found.sections[""]
    for words in ("3.12.3", "0.12.0.1", "CUDA 13.1, driver 590.44", "x86_64", "cores 16"):
        assert words in found.sections[""]
    assert all(claim.text in found.sections["verdict"] for claim in claims(results))
    words = set(re.findall(r"[^\s,/]+", found.text.replace(",", "")))
    for path, value in leaves(results["cases"]):
        forms = {str(value), scientific(value), decimal(value), decimal(value, 6), f"{value:.1%}"}
        forms = {one.replace(",", "") for one in forms}
        assert forms & words, (path, value)
    for one in results["cases"]:
        assert one["name"] in found.sections["cases"]
        for key in ("command", "reference_command"):
            assert (one["result"] or {}).get(key, "") in found.sections["commands"]


def leaves(value, path=()):
    """All numbers in a tree, with their paths."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, (*path, key))
    elif isinstance(value, int | float):
        yield path, value


def test_a_wrong_kernel(results):
    wrong = find(results, "kernels cudnn")
    wrong["result"]["rows"].append(kernel("cudnn bf16 d 160", 3e-3, 4.7e-2))
    for wrong["status"] in ("wrong", "passed"):  # the numbers decide
        assert texts(results, False) == [
            "The kernels do not all agree with their references within the limits on NVIDIA H200: 2 of 3 rows. "
            "Differs: kernels cudnn: cudnn bf16 d 160 (output 3e-3, gradients 4.7e-2, limit 1e-2)."
        ]
        (row,) = Page(page.page(results)).rows_with("kernels", "cudnn bf16 d 160")
        assert "wrong" in row and "4.7" in row and "4.7e-2" in row
    wrong["result"]["rows"][-1]["gradients"] = math.nan
    assert "gradients NaN" in texts(results, False)[0]
    wrong["result"]["rows"].pop()
    wrong |= {"status": "wrong", "reason": "the masked rows are not zero"}
    assert "Differs: kernels cudnn (the masked rows are not zero)." in texts(results, False)[0]


def test_a_text_that_differs(results):
    find(results, "generation gpt2")["result"] |= {"equal": 3, "first_difference": "text 2, token 17"}
    assert texts(results, False) == [
        "Generated texts do not all equal the reference's on NVIDIA H200: 3 of 4 texts. Differs: generation gpt2 (3 of "
        "4 equal)."
    ]
    assert "text 2, token 17" in Page(page.page(results)).sections["generation"]


def test_wrong_losses_are_drawn(results):
    results["cases"].append(losses("losses bf16 fp8 d2", 0.31, 3e-2, status="wrong", reason="losses differ by 0.31"))
    results["cases"].append(losses("losses bf16 ring", 0.01, 3e-2, status="hang", reason="no result within 300 s"))
    results["cases"][-1]["result"] = None
    assert texts(results, False) == [
        "Training in bf16 does not always give the CPU's losses within 3e-2 on NVIDIA H200: 1 of 2 cases. Hang: losses "
        "bf16 ring (no result within 300 s).",
        "Training in bf16 and fp8 does not always give the CPU's losses within 3e-2 on NVIDIA H200: 0 of 1 case. "
        "Differs: losses bf16 fp8 d2 (difference 3.1e-1, limit 3e-2).",
        "1 case hung: losses bf16 ring.",
    ]
    html = page.page(results)
    assert re.findall(r'aria-label="losses of (.*?) and', html) == ["losses bf16 fp8 d2", "checkpoint resume"]
    assert html.count("M0-7L7 0L0 7L-7 0z") == 1  # one diamond beyond its limit
    (row,) = Page(html).rows_with("cases", "losses bf16 ring")
    assert row[:2] == ["∞", "hang"] and "no result within 300 s" in row


def test_the_largest_differences_are_drawn_if_all_passed(results):
    drawn = re.findall(r'aria-label="losses of (.*?) and', page.page(results))
    assert drawn == [
        *("losses bf16 cudnn", "losses fp32 recompute full", "losses fp32 recompute none"),
        "checkpoint resume",
    ]


def test_losses_that_are_not_finite(results):
    wrong = find(results, "losses fp32 chunks 2")
    wrong |= {"status": "wrong", "reason": "the loss is NaN"}
    wrong["result"] |= {"losses": [5.5, math.nan, math.inf, None], "difference": math.nan}
    html = page.page(results)
    Page(html)
    assert "3 losses not finite" in html and not re.search(r'd="[^"]*(nan|inf)', html)
    assert "losses fp32 chunks 2 (difference NaN, limit 1e-4)" in texts(results, False)[0]


def test_a_slow_step(results):
    slow = find(results, "steps gpt2-xl")
    slow |= {"status": "slow", "reason": "llama 1b b2 took 3.1 times its predicted time"}
    slow["result"]["rows"][3]["milliseconds"] = 1066.1
    found = Page(page.page(results))
    (row,) = found.rows_with("steps", "llama 1b b2")
    assert row[1] == "slow" and "-67.7%" in row
    assert {row[1] for row in found.rows_with("steps", "gpt2-xl b4")} == {"passed"}
    (row,) = found.rows_with("cases", "steps gpt2-xl")
    assert "slow" in row and "llama 1b b2 took 3.1 times its predicted time" in row
    (text,) = texts(results, False)
    assert "a largest error of 67.7% (llama 1b b2, megajax)" in text
    assert "Off by more than a factor of 2: llama 1b b2, megajax." in text
    assert text.endswith("More than 2 times the predicted time: steps gpt2-xl.")
    assert any(one.startswith("gpt2-xl b4: 54.8% MFU") for one in texts(results, True))  # slow, but measured


def test_failed_and_skipped_cases(results):
    results["cases"] += [
        case("steps", "steps moe", None, "error", "RESOURCE_EXHAUSTED: out of memory"),
        case("rates", "rates copy", None, "not run", "torch is not installed", None),
        case("kernels", "kernels ring", None, "error", "exit code 1"),
    ]
    false, unknown = texts(results, False), texts(results, None)
    assert "Training steps: 1 of 2 cases failed. Error: steps moe (RESOURCE_EXHAUSTED: out of memory)." in false
    assert any(one.startswith("The kernels do not all agree") and "Error: kernels ring" in one for one in false)
    assert unknown == ["Not run: 1 case: rates copy."]
    found = Page(page.page(results))
    assert "torch is not installed" in found.sections["cases"]


def test_a_case_without_numbers_supports_no_claim(results):
    first, *_ = claims(results | {"cases": [case("losses", "losses fp32 a")]})
    assert first == Claim(
        None,
        "Not measured: whether training in fp32 gives the CPU's losses on NVIDIA H200. Without numbers: losses fp32 a.",
    )


@pytest.mark.parametrize("results", [{}, {"cases": None, "device": None, "versions": None}, {"cases": []}])
def test_empty_results(results):
    found = claims(results)
    assert all(one.holds is None and one.text.startswith("Not measured: ") for one in found) and len(found) == 9
    assert list(Page(page.page(results)).sections)[1:] == ["verdict", "cases", "commands"]


def test_missing_and_null_values_are_no_errors():
    """Every value of the results, one at a time: null, missing, NaN, an empty list, and another type."""
    everything = example()
    for path, _ in branches(everything):
        for value in (None, math.nan, [], {}, "text", ...):
            changed = copy.deepcopy(everything)
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            if value is ...:
                del parent[path[-1]]
            else:
                parent[path[-1]] = value
            claims(changed)
            page.page(changed)


def branches(value, path=()):
    """All values in a tree, with their paths; of a list only the first and the last."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, one in value.items():
            yield from branches(one, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} - {-1}):
            yield from branches(value[index], (*path, index))


def test_names_are_escaped(results):
    nasty = '<b x="1">&\'</i>'

    def renamed(value):
        if isinstance(value, dict):
            return {key if key in KEYS else f"{key}{nasty}": renamed(one) for key, one in value.items()}
        if isinstance(value, list):
            return [renamed(one) for one in value]
        return f"{value}{nasty}" if isinstance(value, str) else value

    for one in results["cases"]:
        one |= {"reason": "because", "name": f"{one['name']}{nasty}"}
        one["result"] = renamed(one["result"])
    find(results, f"generation gpt2{nasty}")["result"]["first_difference"] = nasty
    for key in ("command", "started", "device", "versions"):
        results[key] = renamed(results[key])
    results["cases"].append(case(f"part {nasty}", nasty, {"losses": [1.0]}, nasty, nasty))
    html = page.page(results)
    assert "<b x" not in html and html.count("&lt;b x") > 40
    assert nasty in Page(html).text


def test_a_cpu_supports_no_claim_about_gpus(results):
    note = "This ran on cpu: it supports no claim about GPUs."
    assert note not in page.page(results)
    results["device"]["platform"] = "cpu"
    assert note in page.page(results)


def test_compiled_programs(results):
    """--compile-only: those that the compiler refuses come first, in the claim and in the table."""
    row = {"label": "a", "seconds": 3.0, "peak_gigabytes": 1.5, "predicted_milliseconds": None, "problem": None}
    refused = row | {"label": "b", "peak_gigabytes": None, "problem": "the compiler aborted <here>"}
    results |= {"device": {"platform": "compiler", "kind": "b200", "count": 8}}
    results["cases"] = [
        case("compiled", "kernels: one", {"rows": [row]}),
        case("compiled", "kernels: two", {"rows": [row, refused]}, "error", "1 of 2 programs do not compile"),
        case("compiled", "steps: PyTorch", None, "not run", "PyTorch compiles on a GPU only"),
    ]
    first, *_ = claims(results)
    assert first == Claim(
        False, "For b200, 2 of 3 programs of 3 cases compile; nothing was run. Refused: kernels: two (b)."
    )
    text = page.page(results)
    assert "the compiler aborted &lt;here&gt;" in text and "nothing was run.</p>" in text
    table = text[text.index('<section id="compiled">') :]
    assert table.index("the compiler aborted") < table.index("kernels: one")
    results["cases"] = results["cases"][:1]
    assert claims(results)[0] == Claim(True, "For b200, 1 of 1 program of 1 case compile; nothing was run.")


def test_the_table_of_a_calibration(results):
    results["cases"].append(case("rates", "rates: calibration", {"rows": [], "table": "[measured]\nmemory = 1"}))
    assert not any("calibration" in one.text for one in claims(results))
    assert "<pre>[measured]\nmemory = 1</pre>" in page.page(results)


def test_numbers_as_text():
    assert [scientific(one) for one in (1e-4, 1.25e-5, 0, 0.03, None, math.nan)] == [
        *("1e-4", "1.25e-5", "0", "3e-2", "", "NaN"),
    ]
    assert [decimal(one) for one in (83538.2, 784.52, 0.031, 1.2e-5, None, math.inf, 0, 1000, True)] == [
        *("83,538", "784.5", "0.031", "1.2e-5", "", "inf", "0", "1,000", ""),
    ]


def test_ratios():
    assert relative(2e-4, 1e-4) == 2 and relative(0, 0) == 0 and relative(1, 0) == math.inf
    assert relative(math.nan, 1) == math.inf and relative(None, 1) is None and relative(1, None) is None
    assert speedup({"tokens_per_second": 3, "milliseconds": 9}, {"tokens_per_second": 2}) == 1.5
    assert speedup({"milliseconds": 4}, {"tokens_per_second": 2, "milliseconds": 8}) == 2
    assert speedup({"milliseconds": 4}, {"tokens_per_second": 2}) is None

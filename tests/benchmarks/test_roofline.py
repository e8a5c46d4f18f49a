"""The cases of `python -m benchmarks.compiled account`: a second account of each, and what they must not waste."""

import functools

import pytest

from benchmarks import compiled as programs
from benchmarks.compiled import SETS
from megajax.estimate.hlo import loop_trip_counts
from megajax.estimate.hlo_parser import BRANCHES
from megajax.estimate.memory import bytes_per_device
from megajax.ops.attention_choice import cudnn_installed
from megajax.runtime.compat import jaxlib_version
from tests.estimate.hlo_counter import Counter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.compiler,
    pytest.mark.skipif(not cudnn_installed(), reason="cuDNN is not installed: pip install nvidia-cudnn-cu12"),
]
GB = 1e9


@functools.cache
def compiled(case: str):
    """(run, what `compile_for` returns, the account) of a case."""
    run = programs.run_of(SETS["account"][case])
    return run, *programs.compiled(run, programs.GPU)


@pytest.mark.parametrize("case", SETS["account"])
def test_a_second_account_agrees(case):
    """Within 5%, bytes, FLOPs, kernels and host synchronisations."""
    run, result, found = compiled(case)
    counts = loop_trip_counts(run)
    loops = {scope: count for scope, count in counts.items() if not scope.endswith(BRANCHES)}
    branches = {scope.removesuffix(BRANCHES): counts[scope] for scope in counts if scope.endswith(BRANCHES)}
    second, one = Counter(result["hlo"], loops, branches), found.account
    assert second.bytes == pytest.approx(sum(one.read.values()) + sum(one.written.values()), rel=0.05)
    assert second.flops == pytest.approx(sum(one.flops.values()), rel=0.05)
    assert second.kernels == pytest.approx(sum(one.kernels.values()), rel=0.05)
    assert second.syncs == pytest.approx(one.synchronisations, rel=0.05)


@pytest.mark.skipif(jaxlib_version() < (0, 12), reason="in place and merged from jaxlib 0.12 on")
@pytest.mark.parametrize("case", ["175b", "175b-1f1b", "175b-zb_v"])
def test_nothing_is_copied_or_waited_for(case):
    run, result, found = compiled(case)
    one, zero_bubble = found.account, case == "175b-zb_v"
    assert one.read["copy"] + one.written["copy"] < (210 if zero_bubble else 100) * GB
    assert one.read["accumulation"] + one.written["accumulation"] < 1 * GB
    assert one.synchronisations * 25e-6 < 0.01 * one.total
    assert result["memory"]["peak"] < (62 if zero_bubble else 60) * GB


@pytest.mark.skipif(jaxlib_version() < (0, 12), reason="in place and merged from jaxlib 0.12 on")
def test_one_gpu_is_faster_than_a_step_written_by_hand():
    """Nothing is copied to a stash; the peak is the estimated one."""
    run, result, found = compiled("one-gpu")
    assert found.account.read["stash"] + found.account.written["stash"] < 3 * GB
    assert result["memory"]["peak"] == pytest.approx(sum(bytes_per_device(run).values()), rel=0.03)
    for training_flags, most in ((False, 0.97), (True, 0.99)):
        options = {"training": programs.PLAIN_STEP, "training_flags": training_flags}
        theirs = programs.compiled(run, programs.GPU, **options)[1]
        assert found.seconds < most * theirs.seconds


@pytest.mark.skipif(jaxlib_version() < (0, 12), reason="in place and merged from jaxlib 0.12 on")
def test_merged_ticks_hide_the_collectives_of_tensor_parallelism():
    """64 microbatches of 3 chunks: rank 0 has its last forward in tick 191, and its first backward in tick 31."""
    run, _, found = compiled("175b")
    assert loop_trip_counts(run)["FB" + BRANCHES] == 191 - 31 + 1
    one = found.account
    for kind in ("all-gather", "reduce-scatter"):
        assert one.hidden[kind] > 0.75 * (one.hidden[kind] + one.exposed[kind])


@pytest.mark.skipif(jaxlib_version() < (0, 12), reason="in place and merged from jaxlib 0.12 on")
def test_estimates_of_what_xla_is_wrong_about_are_as_good_as_those_of_all_instructions():
    """The same kernels in other orders: in the default one more collectives overlap matmuls than in XLA's own."""
    result, found = compiled("175b")[1:]
    xla, roofline_s = (compiled(f"175b-{name}")[2].account for name in ("xla", "roofline"))
    assert result["memory"]["peak"] < 60 * GB
    for other in (xla, roofline_s):
        assert sum(found.account.flops.values()) == pytest.approx(sum(other.flops.values()), rel=1e-3)
    assert compiled("175b-roofline")[1]["memory"]["peak"] < 60 * GB
    for one in (found.account, roofline_s):
        assert sum(one.hidden.values()) > 0.75 * (sum(one.hidden.values()) + sum(one.exposed.values()))
        assert one.total < 0.97 * xla.total
    assert found.account.total < 1.01 * roofline_s.total

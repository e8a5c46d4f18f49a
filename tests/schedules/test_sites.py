"""Pipelines over several sites: times worked by hand, the simulation without links, and the round trip's lower bound."""

import math

import pytest

from megajax.schedules.registry import make_schedule, specs
from megajax.schedules.schedule import ScheduleError
from megajax.schedules.simulate import Costs, simulate_event
from megajax.schedules.sites import Sites, simulate_sites

KINDS = [spec.name for spec in specs() if spec.trains and spec.drains and spec.name != "auto"]


def made(name, stages=4, microbatches=8):
    chunks = {"two": 2, "any": 2, "one": 1}[next(spec.chunks for spec in specs() if spec.name == name)]
    return make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)


@pytest.mark.parametrize("name", KINDS)
def test_without_links_it_is_the_simulation_of_one_cluster(name):
    costs = Costs(1.0, 2.5, 1.2, 1.3)
    here, one = simulate_sites(made(name), costs, Sites(2)), simulate_event(made(name), costs)
    assert sorted(here.spans) == sorted(one.spans) and here.peak_live == one.peak_live


@pytest.mark.parametrize("name", KINDS)
def test_with_a_site_for_each_rank_latency_is_that_of_each_send(name):
    here = simulate_sites(made(name), Costs(), Sites(4, latency=0.7))
    assert here.makespan == pytest.approx(simulate_event(made(name), Costs(latency=0.7)).makespan)


def test_two_microbatches_by_hand():
    """Two ranks, F = 1, B = 2, GPipe. A send takes 3 on the link, then 10.

    Rank 0's forwards end at 1 and 2; the link sends them in [1, 4] and [4, 7]; they arrive at 14 and 17. Rank 1's end at 15
    and 18, its backwards of microbatch 1 first or 0 first at 20 and 22; those are sent in [20, 23] and [23, 26] and arrive
    at 33 and 36; rank 0 ends at 35 and 38.
    """
    schedule = make_schedule("gpipe", stages=2, microbatches=2)
    here = simulate_sites(schedule, Costs(), Sites(2, latency=10, transfer=3))
    assert sorted(span.stop for span in here.spans if span.rank == 0) == [1, 2, 35, 38]
    assert sorted(span.stop for span in here.spans if span.rank == 1) == [15, 18, 20, 22]


def test_a_wrapped_pipeline_shares_the_link():
    """Interleaved: forwards of the second chunk and gradients of the first go from site 1 to site 0, one after the other."""
    schedule = make_schedule("interleaved_1f1b", stages=2, microbatches=4, chunks=2)
    messages = 4 + 4 + 4  # activations of stage 1, gradients of stages 1 and 3
    here = simulate_sites(schedule, Costs(), Sites(2, transfer=100.0))
    assert here.makespan >= messages * 100


@pytest.mark.parametrize(("stages", "latency"), [(4, 2.0), (4, 5.0), (6, 3.0)])
def test_1f1b_pays_a_latency_for_each_microbatch(stages, latency):
    """With rank q behind the link: F(k) on q, B(k - p + q + 1) on q, over the link, the same B on q - 1, F(k + 2) on q - 1,
    over the link, F(k + 2) on q. Two microbatches take 2 (F + B) + 2 L.
    """
    times = []
    for count in (60, 100):
        schedule = make_schedule("1f1b", stages=stages, microbatches=count)
        times.append(simulate_sites(schedule, Costs(), Sites(2, latency=latency)).makespan)
    assert (times[1] - times[0]) / 40 == pytest.approx(3 + latency)


def test_jitter_delays_and_depends_on_the_seed_only():
    schedule = made("1f1b", microbatches=64)
    of = lambda **options: simulate_sites(schedule, Costs(), Sites(2, latency=1.0, **options)).makespan  # noqa: E731
    assert of() < of(jitter=0.5) < of(jitter=2.0)
    assert of(jitter=0.5) == of(jitter=0.5) != of(jitter=0.5, seed=1)
    # all sends late by as much as the latest would be worse
    assert of(jitter=0.5) < simulate_sites(schedule, Costs(), Sites(2, latency=1 + 0.5 * math.log(10_000))).makespan


@pytest.mark.parametrize("count", [0, 5])
def test_more_sites_than_stages_are_refused(count):
    with pytest.raises(ScheduleError, match="each has at least one stage"):
        simulate_sites(made("1f1b"), Costs(), Sites(count))

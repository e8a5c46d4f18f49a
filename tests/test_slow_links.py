"""Pipelines over slow links: times worked by hand, the simulation without links, and the round trip's lower bound; the
command's table, and 1F1B made for a link.
"""

import math

import pytest

from experiments.slow_links import Sites, longer_1f1b, main, simulate_sites
from megajax.schedules.registry import make_schedule, specs
from megajax.schedules.schedule import ScheduleError
from megajax.schedules.simulate import Costs, simulate_event

SMALL = "--model gpt3-13b --pipe 4 --tensor 4 --microbatches 16 --schedule 1f1b gpipe"
KINDS = [spec.name for spec in specs() if spec.trains and spec.drains and spec.name != "auto"]


def made(name, stages=4, microbatches=8):
    chunks = {"two": 2, "even": 2, "any": 2, "one": 1}[next(spec.chunks for spec in specs() if spec.name == name)]
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


def test_the_command_says_which_schedule_survives(tmp_path, capsys):
    picture = tmp_path / "sites.svg"
    assert main(f"{SMALL} --latency 50 0 --plot {picture}".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "0 ms    50 ms" in lines[3] and lines[4].split()[0] == "1f1b"
    of = {line[:20].strip(): [float(word[:-1]) for word in line[33:].split()] for line in lines[4:7]}
    (longer,) = [name for name in of if name.endswith("longer")]
    assert of["1f1b"][1] < of[longer][1] <= of["gpipe"][1] + 0.1  # at 50 ms
    assert any("at 50 ms the fastest is" in line for line in lines) and "<svg" in picture.read_text()


@pytest.mark.parametrize(("latency", "transfer"), [(2.0, 0.0), (7.5, 0.0), (4.0, 1.0)])
def test_a_longer_warm_up_hides_the_link(latency, transfer):
    """A microbatch takes F + B = 3, as without the link."""
    sites, rate = Sites(2, latency=latency, transfer=transfer), {}
    for name in ("1f1b", "longer"):
        times = []
        for count in (40, 60):
            schedule = make_schedule("1f1b", stages=4, microbatches=count)
            if name == "longer":
                schedule = longer_1f1b(4, count, sites, latency, 3.0)
                schedule.validate()
            times.append(simulate_sites(schedule, Costs(), sites).makespan)
        rate[name] = (times[1] - times[0]) / 20
    assert rate["longer"] == pytest.approx(3.0) and rate["1f1b"] == pytest.approx(3 + latency + transfer)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--sites 9", "sites = 9 must be at most pipe = 4"),
        ("--latency -1", "--latency: -1.0 must be a number, 0 or more"),
        ("--gbps 0", "--gbps: 0.0 must be a number, above 0"),
        ("--schedule zb_h9", "schedule 'zb_h9' is unknown; did you mean zb_"),
        ("--schedule pipedream_2bw", "pipedream_2bw is not one step of training that drains: pass --schedule gpipe"),
        ("--gpu h100", "gpu = 'h100' is not known"),
        ("--model gpt4", "model = 'gpt4' is not a preset"),
        ("--pipe 64", "stages, each of which needs one: pass other --microbatches, --pipe"),
        ("--model gpt3-175b --tensor 7", "heads = 96 cannot be split over tensor = 7: pass other"),
        ("--microbatches 1 --schedule interleaved_1f1b", "not 1: pass other --microbatches"),
        ("--pipee 3", "did you mean --pipe?"),
    ],
)
def test_wrong_input_is_one_line(words, says, capsys):
    assert main([*SMALL.split(), *words.split()]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and error.count("\n") == 1 and says in error

"""Schedules over slow links: the command's table, and 1F1B made for a link."""

import pytest

from megajax.plan.sites import longer_1f1b, main
from megajax.schedules.registry import make_schedule
from megajax.schedules.simulate import Costs
from megajax.schedules.sites import Sites, simulate_sites

SMALL = "--model gpt3-13b --pipe 4 --tensor 4 --microbatches 16 --schedule 1f1b gpipe"


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
        ("--schedule pipedream_2bw", "pipedream_2bw is not one step of training that drains"),
        ("--gpu h100", "gpu = 'h100' is not known"),
        ("--model gpt4", "'gpt4' is not a preset"),
        ("--pipe 64", "layers"),
    ],
)
def test_wrong_input_is_one_line(words, says, capsys):
    assert main([*SMALL.split(), *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error

"""The comparison of settings, with runs that are not made, and one that is."""

import pytest

from benchmarks import gpu_settings
from megajax.runtime.xla_flags import unknown_flags


def test_every_setting_is_known_to_jaxlib_and_is_added_to_the_users():
    flags = [setting["XLA_FLAGS"] for setting in gpu_settings.SETTINGS.values() if "XLA_FLAGS" in setting]
    assert unknown_flags(flags) == ()
    found = gpu_settings.environment_of(gpu_settings.SETTINGS["nccl-user-buffers"], {"HOME": "/", "XLA_FLAGS": "--a=1"})
    expected = "--a=1 --xla_gpu_enable_nccl_user_buffers=true"
    assert found == {"HOME": "/", "NCCL_NVLS_ENABLE": "1", "XLA_FLAGS": expected}


def test_ratios_are_those_of_the_same_round(monkeypatch, capsys):
    """The machine is twice as slow in the second round; one setting fails and is not tried again."""
    times = iter([0.1, 0.2, "error: no such thing", 0.2, 0.2])
    monkeypatch.setattr(gpu_settings, "step_seconds", lambda options, environment, steps: next(times))
    words = ["--rounds", "2", "--setting", "command-buffers", "--setting", "triton-matmuls"]
    assert gpu_settings.main(words) == 0
    out, error = capsys.readouterr()
    table = dict(line.split(maxsplit=1) for line in out.split("slower:\n")[1].splitlines())
    assert table["megajax's"] == "1.000" and table["command-buffers"] == "1.500"
    assert table["triton-matmuls"] == "failed: error: no such thing" and "no such thing" in error


def test_a_setting_may_be_an_option_of_the_run(monkeypatch):
    words = []
    monkeypatch.setattr(gpu_settings, "step_seconds", lambda options, environment, steps: words.append(options) or 0.1)
    assert gpu_settings.main(["--rounds", "1", "--setting", "xla-latencies", "--tensor", "2"]) == 0
    assert words == [["--tensor", "2"], ["--tensor", "2", "--latency-estimates", "xla"]]


@pytest.mark.slow
def test_a_run_is_timed_and_a_wrong_option_is_one_line(capsys):
    small = (
        "--devices cpu:1 --layers 2 --hidden 32 --sequence-length 16 --global-batch-size 2 --data 1 --pipe 1 --tensor 1"
    )
    words = ["--rounds", "1", "--timed-steps", "2", "--setting", "one-collective", *small.split()]
    assert gpu_settings.main(words) == 0
    assert "one-collective" in capsys.readouterr().out
    assert gpu_settings.main(["--rounds", "1", "--heads", "3", "--hidden", "32"]) == 1
    assert capsys.readouterr().err.count("error: ") == 1

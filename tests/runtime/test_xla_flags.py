import pytest

from megajax.config import ConfigError
from megajax.runtime import xla_flags


def test_the_installed_jaxlib_knows_every_flag():
    assert xla_flags.unknown_flags([*xla_flags.CPU_FLAGS, *xla_flags.GPU_FLAGS]) == ()


def test_a_flag_unknown_to_jaxlib_is_detected_in_a_child_process(monkeypatch):
    flags = ["--xla_gpu_of_old=1", xla_flags.GPU_FLAGS[0], "--xla_gpu_of_tomorrow=2"]
    assert xla_flags.unknown_flags(flags) == ("--xla_gpu_of_old=1", "--xla_gpu_of_tomorrow=2")
    monkeypatch.setattr(xla_flags, "GPU_FLAGS", tuple(flags))
    monkeypatch.setenv("XLA_FLAGS", "")
    assert xla_flags.add_gpu_flags() == ("--xla_gpu_of_old=1", "--xla_gpu_of_tomorrow=2")
    assert xla_flags.os.environ["XLA_FLAGS"] == flags[1]


def test_the_users_flags_are_kept(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false")
    assert xla_flags.add_gpu_flags() == ()
    words = xla_flags.os.environ["XLA_FLAGS"].split()
    assert words == ["--xla_gpu_enable_latency_hiding_scheduler=false", *xla_flags.GPU_FLAGS[1:]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--xla_gpu_misspelt=1", "XLA_FLAGS has --xla_gpu_misspelt=1, which the installed jaxlib does not know"),
        ("--xla_gpu_enable_latency_hiding_scheduler=maybe", "XLA cannot read XLA_FLAGS = .*maybe"),
    ],
)
def test_a_wrong_flag_of_the_users_is_one_clear_line(monkeypatch, flags, message):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(ConfigError, match=message) as error:
        xla_flags.add_gpu_flags()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("value", "refused"), [("=true", True), ("", True), ("=1", True), ("=false", False)])
def test_a_flag_that_breaks_rings_is_refused(monkeypatch, value, refused):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_enable_pipelined_p2p{value}")
    if refused:
        with pytest.raises(ConfigError, match="loses data sent around several rings .*openxla/xla#45222"):
            xla_flags.check_ring_flags("context")
    else:
        xla_flags.check_ring_flags("context")

"""A trace of two steps carries the schedule's names of operations."""

import pytest

from tests.train import runs


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "names"), [("zb_h1", "FIW"), ("1f1b", "FB")])
def test_spans_have_the_names_of_the_schedules_operations(tmp_path, schedule, names):
    result = runs.go(runs.make_run((1, 2, 1), schedule=schedule, steps=5), tmp_path, profile="2:4")
    assert f"profile   steps 2 to 3 in {tmp_path}/profile/process_0" in result.text
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    raw = trace.read_bytes()
    for name in [*names, "send"]:
        assert f"/{name}/".encode() in raw, name
    assert b"_train_step" in raw and b"step_num" in raw

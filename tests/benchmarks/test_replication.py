"""The benchmark of --replicate-state runs and prints its figures."""

import re

import pytest

from benchmarks import replication


@pytest.mark.slow
def test_replication(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["replication", "--every", "1", "--rounds", "1"])
    replication.main()
    assert re.search(r"^104 MB of state, .*\ntraining waits .*\nsteps with a replication", capsys.readouterr().out)

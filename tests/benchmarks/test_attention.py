"""The comparison of attention kernels: here of what stands for tokamax's on a CPU."""

import pytest

from benchmarks.attention import main


@pytest.mark.slow
def test_a_line_for_each_mask_with_small_differences(capsys):
    sizes = {"sequence-length": 40, "heads": 2, "kv-heads": 1, "head-size": 16, "documents": 3}
    sizes |= {"sliding-window": 7, "seconds": 0.01}
    assert main([f"--{name}={size}" for name, size in sizes.items()]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[mask, "tokamax"] for mask in ("causal", "documents", "window")]
    assert all(float(difference) < 1e-5 for row in rows for difference in row[-2:])

"""Configurations that keep their hash are as any frozen dataclass, in this process and in another one."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.gpus import find_gpu

RUN = RunConfig(preset("mixtral-8x7b"), ParallelConfig(tensor=2), TrainConfig())


@pytest.mark.parametrize("one", [RUN, RUN.model, find_gpu("h100-80gb")], ids=lambda one: type(one).__name__)
def test_equal_objects_have_equal_hashes(one):
    before = {one: 1}
    same = dataclasses.replace(one)
    assert same == one and hash(same) == hash(one) == hash(copy.copy(one)) and before[same] == 1
    assert list(vars(one)) == [field.name for field in dataclasses.fields(one)]
    assert repr(same) == repr(one) and dataclasses.asdict(same) == dataclasses.asdict(one)
    name = "imports" if one is RUN else "name"
    assert hash(dataclasses.replace(one, **{name: ("other",)})) != hash(one)


def test_a_hash_is_not_pickled(tmp_path):
    """Hashes of strings differ between processes: one that came along would not find an equal object."""
    hash(RUN), hash(RUN.model)
    (tmp_path / "run").write_bytes(pickle.dumps(RUN))
    code = f"""
import pickle
from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
run = pickle.load(open({str(tmp_path / "run")!r}, "rb"))
own = RunConfig(preset("mixtral-8x7b"), ParallelConfig(tensor=2), TrainConfig())
assert run == own and hash(run) == hash(own) and {{own.model: 1}}[run.model] == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_layout_with_other_fields_is_as_of_replace():
    fields = {"pipe": 4, "schedule": "zb_h1", "context": 2}
    found = RUN.with_layout(**fields)
    assert found == dataclasses.replace(RUN, parallel=dataclasses.replace(RUN.parallel, **fields))
    assert RUN.parallel.pipe == 1 and not hasattr(ParallelConfig, "__post_init__")
    with pytest.raises(TypeError, match="no field pipes"):
        RUN.with_layout(pipes=4)

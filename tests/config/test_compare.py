"""Differences of a run from the defaults, and of a resumed run's data from the checkpoint's."""

import dataclasses
import json

from megajax.config import DataConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.compare import data_differences, differences

RUN = RunConfig(preset("tiny"), ParallelConfig(), TrainConfig())


def test_only_what_differs_is_listed_as_options():
    train = TrainConfig(steps=7, clip_norm=None, batch_ramp=(16, 16, 64))
    run = RunConfig(preset("tiny"), ParallelConfig(pipe=2, sequence_parallel=False), train)
    assert differences(RUN, RUN) == []
    assert differences(run, RUN) == [
        "parallel: --pipe 2 --no-sequence-parallel",
        "train: --batch-ramp 16,16,64 --steps 7 --clip-norm none",
    ]


def test_other_data_is_listed_but_not_another_cache():
    run = dataclasses.replace(RUN, data=DataConfig(data_path=("a", "b"), split="9,1,0", data_cache="cache"))
    stored = json.loads(json.dumps(dataclasses.asdict(run)))["data"]  # as in a checkpoint: tuples become lists
    assert data_differences(stored, run) == []
    other = dataclasses.replace(run, data=DataConfig(data_path=("a", "c"), split="9,1,0"))
    assert data_differences(stored, other) == ["data_path was ['a', 'b'], is ('a', 'c')"]
    assert data_differences(None, other) == []

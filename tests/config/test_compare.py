"""Differences of a run from the defaults, and of a resumed run's data from the checkpoint's."""

import dataclasses
import json

from megajax.config import DataConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.compare import changed_options, data_differences, library_defaults

RUN = RunConfig(preset("tiny"), ParallelConfig(), TrainConfig())


def test_only_what_differs_is_listed_as_options():
    train = TrainConfig(steps=7, clip_norm=None, batch_ramp=(16, 16, 64))
    data = DataConfig(data_path=("0.3", "a", "0.7", "b"))
    run = RunConfig(preset("tiny"), ParallelConfig(pipe=2, sequence_parallel=False), train, data)
    output = OutputConfig(save_every=5)
    assert changed_options(RUN, output, RUN, output) == ""
    words = "--pipe 2 --no-sequence-parallel --batch-ramp 16,16,64 --steps 7 --clip-norm none --data-path 0.3 a 0.7 b"
    assert changed_options(run, output, RUN, OutputConfig()) == f"{words} --save-every 5"
    assert changed_options(run, output, RUN, OutputConfig(), names=("steps", "seed")) == "--steps 7"


@dataclasses.dataclass(frozen=True)
class OwnModel:
    name: str
    layers: int = 2
    width: int = 8


def test_the_defaults_of_a_library_run_are_the_presets():
    model = dataclasses.replace(preset("tiny"), hidden=64)
    for run, changed in (
        (RunConfig(model, ParallelConfig(data=2), TrainConfig()), "--hidden 64 --data 2"),
        (RunConfig(OwnModel("own", width=4), ParallelConfig(), TrainConfig(steps=3)), "--steps 3"),
    ):
        assert changed_options(run, OutputConfig(), library_defaults(run), OutputConfig()) == changed


def test_other_data_is_listed_but_not_another_cache():
    run = dataclasses.replace(RUN, data=DataConfig(data_path=("a", "b"), split="9,1,0", data_cache="cache"))
    stored = json.loads(json.dumps(dataclasses.asdict(run)))["data"]  # as in a checkpoint: tuples become lists
    assert data_differences(stored, run) == []
    other = dataclasses.replace(run, data=DataConfig(data_path=("a", "c"), split="9,1,0"))
    assert data_differences(stored, other) == ["data_path was ['a', 'b'], is ('a', 'c')"]
    older = {name: value for name, value in stored.items() if name != "eod_mask_loss"}  # a younger field: its default
    assert data_differences(older, run) == []
    assert data_differences(None, other) == []

"""The dataclasses: legal values, rules between them, and messages whose remedies are legal."""

import contextlib
import dataclasses
import itertools
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megajax.config import (
    ConfigError,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    option,
    padded_vocabulary,
)

CONFIGS = (ModelConfig, ParallelConfig, TrainConfig, DataConfig, OutputConfig, LaunchConfig)
SMALL = {"layers": 8, "hidden": 96, "heads": 12, "vocabulary": 257, "sequence_length": 64}


def make_run(**fields) -> RunConfig:
    """A legal run on one device, with the given fields of ModelConfig, ParallelConfig or TrainConfig."""
    split = {config: {} for config in (ModelConfig, ParallelConfig, TrainConfig)}
    for name, value in (SMALL | {"global_batch_size": 8} | fields).items():
        owner = next(config for config in split if name in config.__dataclass_fields__)
        split[owner][name] = value
    return RunConfig(*(config(**values) for config, values in split.items()))


ILLEGAL = [
    # fields, device count, what the message must contain
    ({"heads": 0}, None, ["heads = 0", "1 or more", "--heads"]),
    ({"hidden": -96}, None, ["hidden = -96", "1 or more", "--hidden"]),
    ({"layers": 2.5}, None, ["layers = 2.5", "whole number", "--layers"]),
    ({"pipe": True}, None, ["pipe = True", "whole number", "--pipe"]),
    ({"dropout": 1.0}, None, ["dropout = 1.0", "0 or more and below 1", "--dropout"]),
    ({"dropout": -0.1}, None, ["dropout = -0.1", "--dropout"]),
    ({"learning_rate": 0.0}, None, ["learning_rate = 0.0", "above 0", "--learning-rate"]),
    ({"learning_rate": float("nan")}, None, ["learning_rate = nan", "above 0", "--learning-rate"]),
    ({"learning_rate": "fast"}, None, ["learning_rate = 'fast'", "a number"]),
    ({"beta2": 1.0}, None, ["beta2 = 1.0", "below 1", "--beta2"]),
    ({"clip_norm": 0.0}, None, ["clip_norm = 0.0", "above 0", "--clip-norm"]),
    ({"weight_decay": -1.0}, None, ["weight_decay = -1.0", "0 or more", "--weight-decay"]),
    ({"steps": 0}, None, ["steps = 0", "--steps"]),
    ({"biases": "no"}, None, ["biases = 'no'", "--biases or --no-biases"]),
    ({"schedule": "1f1bb"}, None, ["schedule = '1f1bb'", "did you mean 1f1b", "--schedule gpipe|1f1b|"]),
    ({"recompute": "selctive"}, None, ["recompute = 'selctive'", "did you mean selective?", "--recompute"]),
    ({"precision": "float8"}, None, ["precision = 'float8'", "choose from bf16, fp32, fp16", "--precision"]),
    ({"norm": "rmsnorn"}, None, ["norm = 'rmsnorn'", "did you mean rmsnorm", "--norm"]),
    ({"activation": "swigl"}, None, ["activation = 'swigl'", "did you mean swiglu?", "--activation"]),
    ({"positions": "rotery"}, None, ["positions = 'rotery'", "did you mean rotary?", "--positions"]),
    ({"heads": 7}, None, ["hidden = 96", "heads = 7", "--heads 3, 4, 6 or 8", "--hidden 91 or 98"]),
    ({"kv_heads": 5}, None, ["kv_heads = 5", "heads = 12", "--kv-heads 2, 3, 4 or 6"]),
    ({"positions": "rotary", "heads": 32}, None, ["head size", "3 is odd", "--positions learned", "--heads"]),
    ({"heads": 7, "head_size": 5, "positions": "rotary"}, None, ["head_size = 5 is odd", "--head-size 6"]),
    ({"rotary_scaling": "yarn", "rotary_factor": 4.0}, None, ["positions = learned", "--positions rotary"]),
    ({"positions": "rotary", "rotary_scaling": "yarn"}, None, ["needs a rotary_factor", "--rotary-factor 8"]),
    (
        {"positions": "rotary", "rotary_scaling": "longrope", "rotary_factor": 4.0, "rotary_factors": ("2", "-1.0")},
        None,
        ["longrope needs 8 rotary_factors above 0, and these are 2: 2, -1.0", "With longrope pass two for each pair"],
    ),
    ({"rotary_factors": ("2",)}, None, ["rotary_scaling = none needs 0 rotary_factors", "else none"]),
    ({"positions": "rotary", "rotary_factor": 2.0}, None, ["does nothing without a scaling", "--rotary-scaling"]),
    (
        {"positions": "rotary", "rotary_fraction": 0.4},
        None,
        ["rotary_fraction = 0.4", "are 3", "--rotary-fraction 0.25"],
    ),
    ({"rotary_fraction": 1.5}, None, ["rotary_fraction = 1.5 is above 1", "--rotary-fraction 1"]),
    (
        {"positions": "rotary", "rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_low_frequency": 4.5},
        None,
        ["rotary_low_frequency = 4.5 must not be above rotary_high_frequency = 4.0", "--rotary-low-frequency 1"],
    ),
    (
        {"positions": "rotary", "rotary_scaling": "yarn", "rotary_factor": 8.0, "rotary_beta_slow": 40.0},
        None,
        ["rotary_beta_slow = 40.0", "--rotary-beta-fast 32"],
    ),
    ({"rotated_norm": True}, None, ["rotated_norm = True", "--positions rotary or --no-rotated-norm"]),
    ({"sliding_window": 0}, None, ["sliding_window = 0", "1 or more", "--sliding-window"]),
    ({"qkv_biases": "no"}, None, ["qkv_biases = 'no'", "--qkv-biases or --no-qkv-biases"]),
    ({"warmup_steps": 201}, None, ["warmup_steps = 201", "steps = 200", "--warmup-steps 20"]),
    ({"minimum_learning_rate": 1.0}, None, ["minimum_learning_rate = 1.0", "--minimum-learning-rate 6e-05"]),
    ({"tensor": 8}, None, ["heads = 12", "tensor = 8", "--tensor 1, 2 or 4", "--heads 8 or 16"]),
    ({"tensor": 6}, None, ["sequence_length = 64", "--tensor 1, 2 or 4", "--no-sequence-parallel"]),
    (
        {"tensor": 4, "context": 3, "sequence_length": 1026, "vocabulary": 512},
        None,
        ["sequence_length / context = 1026 / 3 = 342", "--sequence-length 1020 or 1032", "--no-sequence-parallel"],
    ),
    ({"tensor": 3, "kv_heads": 2}, None, ["kv_heads = 2", "tensor = 3", "--tensor 1", "--kv-heads 3"]),
    ({"tensor": 4, "feedforward": 90}, None, ["feedforward = 90", "--tensor 1 or 2", "--feedforward 88 or 92"]),
    ({"axis_order": ("data", "pipe")}, None, ["axis_order = data,pipe", "--axis-order data,pipe,tensor"]),
    (
        {"chunks": 2, "pipe": 2, "schedule": "1f1b"},
        None,
        ["chunks = 2", "1f1b has one chunk on each rank, not 2", "--chunks 1"],
    ),
    ({"chunks": 2}, None, ["chunks = 2", "pipe = 1", "--chunks 1", "--pipe 2"]),
    ({"layers": 3, "pipe": 4}, None, ["layers = 3 cannot", "4 * 1 = 4 stages", "--layers 4", "--pipe 1, 2 or 3."]),
    (
        {"layers": 6, "pipe": 4, "chunks": 2},
        None,
        ["layers = 6 cannot", "4 * 2 = 8 stages", "--layers 8", "--pipe 2 or 3", "--chunks 1."],
    ),
    (
        {"layers": 10, "pipe": 2, "recompute": "full", "recompute_blocks": 4},
        None,
        ["recompute_blocks = 4 does not divide layers = 10", "--recompute-blocks 1, 2 or 5", "--layers 8 or 12"],
    ),
    (
        {"layers": 8, "pipe": 4, "recompute": "full", "recompute_blocks": 4},
        None,
        ["layers = 8 in 2 groups of recompute_blocks = 4", "= 4 stages", "--layers 16", "--recompute-blocks 1 or 2"],
    ),
    (
        {"global_batch_size": 10, "data": 4},
        None,
        ["global_batch_size = 10", "1 * 4 = 4", "--global-batch-size 8 or 12", "--data 1, 2, 5 or 10"],
    ),
    (
        {"global_batch_size": 6, "pipe": 4},
        None,
        ["microbatches", "= 6", "pipe = 4", "--global-batch-size 4 or 8", "--schedule 1f1b."],
    ),
    (
        {"global_batch_size": 6, "pipe": 4, "chunks": 2},
        None,
        ["microbatches", "--schedule 1f1b --chunks 1"],
    ),
    (
        {"pipe": 2, "tensor": 2},
        8,
        ["1 * 2 * 2 = 4 devices", "there are 8", "--data 2 --pipe 2 --tensor 2", "--devices cpu:4"],
    ),
    ({"data": 8}, 7, ["8 * 1 * 1 = 8 devices", "no mesh of 7 fits", "--devices cpu:8"]),
]


@pytest.mark.parametrize("fields,devices,parts", ILLEGAL, ids=lambda value: str(value)[:50])
def test_an_illegal_run_is_refused_in_one_line(fields, devices, parts):
    with pytest.raises(ConfigError) as error:
        make_run(**fields).validate(devices)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    for part in parts:
        assert part in message


@given(
    layers=st.integers(1, 24),
    heads=st.sampled_from([1, 2, 3, 4, 6, 8]),
    global_batch_size=st.integers(1, 24),
    data=st.integers(1, 4),
    pipe=st.integers(1, 6),
    tensor=st.integers(1, 4),
    chunks=st.integers(1, 3),
    microbatch_size=st.integers(1, 3),
    schedule=st.sampled_from(["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b"]),
    sequence_parallel=st.booleans(),
)
def test_validate_accepts_exactly_the_runs_that_can_be_split(**fields):
    legal = (
        fields["heads"] % fields["tensor"] == 0
        and (not fields["sequence_parallel"] or 64 % fields["tensor"] == 0)
        and 4 * 96 % fields["tensor"] == 0
        and fields["layers"] >= fields["pipe"] * fields["chunks"]
        and fields["global_batch_size"] % (fields["microbatch_size"] * fields["data"]) == 0
        and (fields["chunks"] == 1 or (fields["schedule"] == "interleaved_1f1b" and fields["pipe"] > 1))
    )
    run = make_run(**fields)
    if legal and fields["schedule"] == "interleaved_1f1b":
        legal = run.microbatches % fields["pipe"] == 0
    if legal:
        run.validate(run.parallel.devices)
        assert run.microbatches * fields["microbatch_size"] * fields["data"] == fields["global_batch_size"]
    else:
        with pytest.raises(ConfigError):
            run.validate()


def any_mesh_is_legal(run, devices: int) -> bool:
    """Tries every (data, pipe, tensor) whose product is the number of devices."""
    for data, pipe in itertools.product(range(1, devices + 1), repeat=2):
        if devices % (data * pipe) == 0:
            sizes = {"data": data, "pipe": pipe, "tensor": devices // (data * pipe)}
            other = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **sizes))
            with contextlib.suppress(ConfigError):
                other.validate(devices)
                return True
    return False


@given(devices=st.integers(1, 96), data=st.integers(1, 4), pipe=st.sampled_from([1, 2, 4]))
def test_meshes_offered_for_the_devices_are_legal_and_use_all(devices, data, pipe):
    run = make_run(global_batch_size=48, data=data, pipe=pipe, layers=24)
    assume(run.parallel.devices != devices)
    with pytest.raises(ConfigError) as error:
        run.validate(devices)
    offered = re.findall(r"--data (\d+) --pipe (\d+) --tensor (\d+)", str(error.value))
    assert bool(offered) == any_mesh_is_legal(run, devices), "a mesh is offered if and only if one is legal"
    assert ("no mesh of" in str(error.value)) == (not offered)
    for mesh in offered:
        sizes = dict(zip(("data", "pipe", "tensor"), map(int, mesh), strict=True))
        other = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **sizes))
        other.validate(devices)


@given(offered=st.integers(1, 60), heads=st.integers(1, 60))
def test_heads_and_widths_offered_by_a_message_are_legal(offered, heads):
    assume(offered * 2 % heads)
    with pytest.raises(ConfigError) as error:
        make_run(hidden=offered * 2, heads=heads).validate()
    options = re.fullmatch(r".*: pass --heads (.*), or --hidden (.*)\.", str(error.value)).groups()
    legal_heads, legal_hidden = ([int(number) for number in re.findall(r"\d+", numbers)] for numbers in options)
    assert legal_heads and legal_hidden
    for value in legal_heads:
        make_run(hidden=offered * 2, heads=value).validate()
    for value in legal_hidden:
        make_run(hidden=value, heads=heads).validate()


@given(vocabulary=st.integers(1, 300_000), tensor=st.integers(1, 64))
def test_a_padded_vocabulary_is_the_smallest_that_splits_into_tiles(vocabulary, tensor):
    padded = padded_vocabulary(vocabulary, tensor)
    assert padded >= vocabulary and padded % 128 == 0 and padded % tensor == 0
    smaller = range(vocabulary, padded)
    assert not any(rows % 128 == 0 and rows % tensor == 0 for rows in smaller)


def test_grouped_query_attention_has_fewer_key_and_value_weights():
    grouped = ModelConfig(**SMALL, kv_heads=3)
    every = ModelConfig(**SMALL)
    assert (every.key_value_heads, grouped.key_value_heads, grouped.head_dimension) == (12, 3, 8)
    # 9 heads of 8 fewer for keys and as many for values, each with 96 weights and a bias, in 8 layers
    assert every.parameters - grouped.parameters == 8 * (2 * 9 * 8) * (96 + 1)


def test_every_field_has_help_and_one_option_of_its_own():
    fields = [field for config in CONFIGS for field in dataclasses.fields(config)]
    assert all(field.metadata["help"] for field in fields)
    options = [option(field.name) for field in fields]
    assert len(set(options)) == len(options)
    assert option("global_batch_size") == "--global-batch-size"


def test_defaults_of_named_fields_are_among_their_choices():
    for config in CONFIGS:
        for field in dataclasses.fields(config):
            names = field.metadata["choices"] + ((None,) if field.type == str | None else ())
            assert not field.metadata["choices"] or field.default in names


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """A user's model configuration: the two required fields, and a rule about its layout."""

    name: str = "own"
    layers: int = 6

    def check_parallel(self, parallel: ParallelConfig) -> None:
        if parallel.tensor > 1:
            raise ConfigError("tensor is not supported: pass --tensor 1.")


def test_a_users_model_is_checked_by_its_own_rules_and_the_general_ones():
    train = TrainConfig(global_batch_size=8)
    RunConfig(OwnModel(), ParallelConfig(pipe=2), train).validate(2)
    with pytest.raises(ConfigError, match="tensor is not supported"):
        RunConfig(OwnModel(), ParallelConfig(tensor=2), train).validate()
    with pytest.raises(ConfigError, match="layers = 6 cannot be cut into"):
        RunConfig(OwnModel(), ParallelConfig(pipe=8, schedule="1f1b"), train).validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "a", "data_path": ("b",)}, "--text and --data-path exclude one another"),
        ({"data_path": ("a",), "train_data_path": ("b",)}, "--data-path and --train-data-path exclude one another"),
        ({"valid_data_path": ("b",)}, "pass --train-data-path PREFIX"),
        ({"split": "9,1,0"}, "pass --data-path PREFIX"),
        ({"text": 3}, "text = 3 must be a text"),
        ({"data_path": "b"}, "data_path = 'b' must be a list of texts"),
        ({"eod_mask_loss": "no"}, "eod_mask_loss = 'no' must be True or False"),
    ],
)
def test_illegal_data_options_are_refused_by_the_run(fields, message):
    run = RunConfig(ModelConfig(**SMALL), ParallelConfig(), TrainConfig(), DataConfig(**fields))
    with pytest.raises(ConfigError, match=message):
        run.validate()


def test_clipping_can_be_off():
    make_run(clip_norm=None).validate()


def test_whole_numbers_of_any_length_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="seed = 1000.* must be a whole number, 0 or more and below 4294967296"):
        TrainConfig(seed=10**400).validate()

"""The smallest change that makes a run fit: any option of the layout, any two, and the mesh, on the GPUs it says."""

import dataclasses

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.cli import parse
from megajax.estimate.gpus import find_gpu, with_attention
from megajax.estimate.memory import bytes_per_device
from megajax.plan import dryrun
from megajax.plan.search import usable_bytes
from megajax.plan.suggest import smallest_change
from megajax.schedules.registry import find, names

H100 = find_gpu("h100-80gb")


def run_of(model, batch, **fields) -> RunConfig:
    model = preset(model)
    run = with_attention(RunConfig(model, ParallelConfig(**fields), TrainConfig(global_batch_size=batch)), H100)
    run.validate()
    return run


def passed(run: RunConfig, options: str) -> ParallelConfig:
    """The layout that the command line reads with these options after those of the run."""
    fields = {name: value for name, value in dataclasses.asdict(run.parallel).items() if name != "axis_order"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items() if type(value) in (int, str)]
    words += ["" if value else f"--no-{name.replace('_', '-')}" for name, value in fields.items() if value is False]
    words += ["--model", run.model.name, "--global-batch-size", str(run.train.global_batch_size)]
    request = parse([*filter(None, words), *options.split()], "", {})
    return request.run(request.devices_needed, "bf16").parallel


@pytest.mark.parametrize(
    ("run", "options", "devices"),
    [
        # context 4 on 8 replicas is 32 GPUs; what is proposed for as many GPUs must need as many
        (run_of("llama2-7b", 64, data=8, context=4), "--zero 1", 32),
        (run_of("gpt3-175b", 64, data=8, context=4, pipe=4, tensor=8), "--zero 1", 1024),
        (run_of("gpt3-13b", 64, data=8), "--zero 3", 8),
        (run_of("gpt3-13b", 64, data=4, pipe=2, recompute="none", schedule="gpipe"), "--zero 1 --schedule 1f1b", 8),
        # four times the GPUs, for a model whose weights do not fit on fewer
        (run_of("gpt3-175b", 64, pipe=2, tensor=8, context=2), "--context 1 --pipe 8", 64),
    ],
)
def test_it_proposes_zero_and_counts_the_gpus_of_a_context_group(run, options, devices):
    assert sum(bytes_per_device(run).values()) > usable_bytes(H100)
    found = smallest_change(run, H100)
    assert found.run.parallel.devices == devices and ("times the GPUs" in found.cost) == (
        devices > run.parallel.devices
    )
    if devices == run.parallel.devices:
        assert found.options == options
    assert sum(bytes_per_device(found.run).values()) == found.peak <= usable_bytes(H100)
    assert passed(run, found.options) == found.run.parallel


@pytest.mark.parametrize(
    ("fields", "keep", "proposed"),
    [
        ({"microbatch_size": 8}, ("zero", "attention", "recompute", "schedule"), "--microbatch-size"),
        ({"attention": "xla", "recompute": "none"}, ("zero", "recompute"), "--attention cudnn"),
        (
            {"sequence_parallel": False, "microbatch_size": 4},
            ("zero", "microbatch_size", "recompute"),
            "--sequence-parallel",
        ),
        ({"recompute": "full", "microbatch_size": 16}, ("zero", "microbatch_size"), "--recompute-blocks"),
    ],
)
def test_any_option_can_be_proposed(fields, keep, proposed):
    """Each with the other remedies withheld; a GPU as small as the run needs without it."""
    run = run_of("gpt3-6.7b", 256, **{"data": 2, "pipe": 2, "tensor": 2, "schedule": "1f1b"} | fields)
    mesh = ("data", "context", "pipe", "tensor", "schedule", "chunks", "offload_activations")
    memory = int(0.995 * sum(bytes_per_device(run).values()) / usable_bytes(H100) * H100.memory)
    found = smallest_change(run, dataclasses.replace(H100, memory=memory), keep=(*keep, *mesh))
    assert proposed in found.options
    assert passed(run, found.options) == found.run.parallel


def test_two_options_if_one_is_not_enough():
    run = run_of("gpt3-13b", 64, data=4, pipe=2, recompute="none", schedule="gpipe")
    for keep, options in (((), "--zero 1 --schedule 1f1b"), (("schedule",), "--zero 1 --recompute full")):
        assert smallest_change(run, H100, keep=keep).options == options


def test_what_must_stay_is_not_proposed():
    run = run_of("gpt3-13b", 64, data=8)
    assert "--zero" not in smallest_change(run, H100, keep=("zero",)).options


@pytest.mark.parametrize("name", names())
def test_every_schedule_gets_a_proposal(name, capsys):
    """Those without closed forms too, in seconds; `auto` with its options."""
    chunks = {"one": 1, "two": 2, "even": 2, "any": 2}[find(name).chunks]
    words = f"--model gpt3-13b --gpu h100-80gb --pipe 4 --global-batch-size 16 --microbatch-size 2 --schedule {name}"
    live = " --live-chunks 4" if name == "auto" else ""
    assert dryrun.main(f"{words} --chunks {chunks}{live} --recompute none --model-only".split()) == 1
    assert "the smallest change that makes it fit: --" in capsys.readouterr().out

"""`--vocab-parallel auto`: what fits and is faster by the time model, which the compiled programs confirm."""

import dataclasses

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.auto import resolved, resolved_layout, with_vocabulary
from megajax.estimate.gpus import find_gpu, with_attention
from megajax.estimate.memory import USABLE_SHARE, bytes_per_device
from megajax.plan import dryrun
from megajax.plan.search import Question, search

H100 = find_gpu("h100-80gb")
SLOW = dataclasses.replace(H100, network_bandwidth=H100.network_bandwidth / 8)


def run_of(model: str, placement: str = "auto", **fields) -> RunConfig:
    run = RunConfig(
        preset(model), ParallelConfig(vocab_parallel=placement, **fields), TrainConfig(global_batch_size=64)
    )
    run.validate()
    return run


GPT3 = {"tensor": 8, "pipe": 8, "chunks": 3}


@pytest.mark.parametrize(
    ("run", "gpu", "chosen"),
    [
        # compiled for H100s, GPT-3 175B takes 4,190 ms with pipe and 4,164 with tensor, a tie (results/time_model.txt)
        (run_of("gpt3-175b", **GPT3), H100, "pipe"),
        (
            run_of("gpt3-175b", **GPT3),
            SLOW,
            "tensor",
        ),  # five sums of an activation over the network for each microbatch
        (run_of("llama3-8b", pipe=8, chunks=2), SLOW, "pipe"),  # 128k rows: the logits take longer than that
        (run_of("llama3-8b", data=8), H100, "pipe"),  # the same
        (run_of("gpt3-175b", "tensor", **GPT3), H100, "tensor"),  # as passed
    ],
)
def test_the_faster_one_is_chosen(run, gpu, chosen):
    assert with_vocabulary(run, gpu) == dataclasses.replace(
        run, parallel=dataclasses.replace(run.parallel, vocab_parallel=chosen)
    )


def test_the_one_that_fits_is_chosen():
    """Where only a split over pipe fits, the network does not matter; where nothing does, the smaller one is chosen."""
    pipe, tensor = (
        sum(bytes_per_device(with_attention(run_of("gpt3-175b", one, **GPT3), H100)).values())
        for one in ("pipe", "tensor")
    )
    assert pipe < tensor
    for usable, chosen in ((tensor, "tensor"), ((pipe + tensor) // 2, "pipe"), (pipe // 2, "pipe")):
        gpu = dataclasses.replace(SLOW, memory=int(usable / USABLE_SHARE) + 1)
        assert with_vocabulary(run_of("gpt3-175b", **GPT3), gpu).parallel.vocab_parallel == chosen


def test_no_option_of_a_resolved_run_is_auto():
    """The layout is the same whether its attention is resolved too, and one with nothing left to resolve is unchanged."""
    run = run_of("mixtral-8x7b", data=8, expert=8, pipe=2, tensor=8)
    found = resolved(run, H100)
    assert "auto" not in dataclasses.asdict(found.parallel).values()
    kept = dataclasses.replace(found.parallel, attention=run.parallel.attention)
    assert resolved_layout(run, H100) == dataclasses.replace(run, parallel=kept)
    assert resolved(found, H100) == found


def test_the_planner_chooses_for_each_layout():
    narrow = {
        "tensor_sizes": (8,),
        "recomputes": ("selective",),
        "schedules": ("interleaved_1f1b",),
        "microbatches": (1,),
    }
    question = Question(preset("gpt3-175b"), 64, SLOW, 64, **narrow)
    times = {
        placement: {
            one.mesh: one for one in search(dataclasses.replace(question, vocab_parallel=placement)) if one.fits
        }
        for placement in ("pipe", "tensor", "auto")
    }
    for mesh, one in times["auto"].items():
        fastest = min(times[name][mesh].time.total for name in ("pipe", "tensor") if mesh in times[name])
        assert one.time.total == fastest and one.run.parallel.vocab_parallel != "auto"


def test_the_dry_run_takes_it(capsys):
    words = "--model llama3-8b --gpu h100-80gb --pipe 4 --tensor 2 --vocab-parallel auto --global-batch-size 32"
    assert dryrun.main([*words.split(), "--model-only"]) == 0
    alone = capsys.readouterr().out
    assert dryrun.main([*words.replace("auto", "pipe").split(), "--model-only"]) == 0
    assert capsys.readouterr().out == alone

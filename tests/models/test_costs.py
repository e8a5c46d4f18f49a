"""A model's costs as plain numbers: the transformer's parameters and FLOPs by formula, and another model by hand."""

import dataclasses

import pytest

from megajax import estimate
from megajax.config import PRESETS, ParallelConfig, RunConfig, TrainConfig
from megajax.estimate.communication import expected
from megajax.estimate.flops import flops_per_step, hardware_flops_per_step
from megajax.estimate.gpus import find_gpu, with_attention
from megajax.estimate.memory import bytes_per_device
from megajax.estimate.step_time import step_time
from megajax.models.costs import KeptValue, Matmul, ModelCosts, Parameters
from megajax.models.remat import MODES
from megajax.models.transformer_costs import transformer_costs
from megajax.pipeline.program import StepProgram


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_the_presets(name):
    """`ModelConfig.parameters` counts array by array; tests/estimate compares it with 2104.04473 equation 2."""
    assert estimate.model_costs(PRESETS[name]).parameters == PRESETS[name].parameters


def test_every_kept_name_is_a_value_of_the_transformer():
    before = dataclasses.replace(PRESETS["gpt2"], dropout=0.1, experts=4)
    after = dataclasses.replace(PRESETS["bert-336m"], post_norm=True)
    # the attention's input is the block's input with norms after the additions
    both = dataclasses.replace(before, norm_placement="both")
    outputs = {"attention_output", "feedforward_output"}  # before their norms
    latents = {"latents", "expanded"}  # of latent attention
    after_absent = {"attention_input", "router", "dispatched"} | outputs | latents
    of_latents = dataclasses.replace(PRESETS["deepseek-v3"].of_kind("sparse"), dropout=0.1)
    cases = (
        (before, {"output_residual"} | outputs | latents),
        (both, {"output_residual"} | latents),
        (after, after_absent),
    )
    for config, absent in (*cases, (of_latents, {"output_residual", "qkv"} | outputs)):
        costs = transformer_costs(config)
        for mode, names in MODES.items():
            values = {value.name for fused in (False, True) for value in costs.kept_values(mode, fused)}
            assert values == {"input", *names} - absent


@dataclasses.dataclass(frozen=True)
class Mlp:
    """A model of layers x -> down(gelu(up(x))) with no attention, vocabulary or sequence."""

    name: str = "mlp"
    layers: int = 8


MLP = ModelCosts(
    layers=8,
    hidden=32,
    sequence_length=1,
    vocabulary=0,
    matmuls=(Matmul("up", 32, 128, "column", ("full",)), Matmul("down", 128, 32, "row")),
    attention=None,
    block=Parameters(split=2 * 32 * 128),
    shared=Parameters(whole=32 * 32),
    vocabulary_width=0,
    kept=(KeptValue("input", 32, split=None), KeptValue("up", 128, split="tensor", modes=("none", "selective"))),
    kept_for_weights=(KeptValue("gradient of up", 128, split="tensor"), KeptValue("gradient of down", 32, split=None)),
)


def test_costs_of_a_model_without_attention_by_hand(monkeypatch):
    costs = estimate.model_costs.__wrapped__
    for module in ("flops", "gpus", "kept", "kinds", "memory", "parameters", "program_kernels", "communication"):
        monkeypatch.setattr(
            f"megajax.estimate.{module}.model_costs", lambda model: MLP if isinstance(model, Mlp) else costs(model)
        )
    parallel = ParallelConfig(data=2, pipe=2, tensor=2, schedule="1f1b", microbatch_size=4)
    run = RunConfig(Mlp(), parallel, TrainConfig(global_batch_size=32))
    # 8 layers of two matmuls of 32 x 128, two operations each, three times, for 32 samples
    assert flops_per_step(run) == 3 * 32 * 8 * 2 * 2 * 32 * 128
    again = dataclasses.replace(run, parallel=dataclasses.replace(parallel, recompute="full"))
    assert hardware_flops_per_step(again) - flops_per_step(run) == 32 * 8 * 2 * 32 * 128
    memory = bytes_per_device(run)
    parameters = 4 * 2 * 32 * 128 // 2 + 32 * 32  # four layers, split over tensor; the shared ones are whole
    assert memory["weights"] == 4 * parameters and memory["optimizer"] == 8 * parameters
    assert memory["stash"] == 2 * 4 * 2 * (4 * 32 + 4 * 128 // 2)  # two microbatches of four layers, 2 bytes each
    assert memory["copies"] == 0
    time = step_time(run, find_gpu("h100-80gb"))
    assert time.total > 0 and time.head == 0
    assert with_attention(run, find_gpu("h100-80gb")).parallel.attention == "xla"
    lines = {line.what: line.bytes for line in expected(StepProgram.of(run))}
    # one pair a layer: 4 bsh (t-1)/t, four layers, four microbatches of four samples, 2 bytes
    assert lines["pairs of matmuls"] == 4 * 4 * 4 * (4 * 32) * 2 / 2
    assert "embedding and head" not in lines and "shared embedding and head" not in lines

"""Counted FLOPs and parameters against the equations and tables of the papers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.rows import equation_3_flops
from megajax.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.flops import (
    causal_flops_per_step,
    flops_per_step,
    forward_flops,
    hardware_flops_per_step,
)
from megajax.models.costs import ModelCosts
from megajax.models.transformer_costs import transformer_costs

SHAPES = {
    "layers": st.integers(1, 128),
    "heads": st.integers(1, 64),
    "head_size": st.integers(1, 128),
    "vocabulary": st.integers(1, 100_000),
    "sequence_length": st.integers(1, 8192),
}

# 2104.04473 table 1: billions of parameters, batch, GPUs, TFLOP/s per GPU.
TABLE_1 = [
    ("megatron-1.7b", 1.7, 512, 32, 137),
    ("megatron-3.6b", 3.6, 512, 64, 138),
    ("megatron-7.5b", 7.5, 512, 128, 142),
    ("megatron-18.4b", 18.4, 1024, 256, 135),
    ("megatron-39.1b", 39.1, 1536, 512, 138),
    ("megatron-76.1b", 76.1, 1792, 1024, 140),
    ("megatron-145.6b", 145.6, 2304, 1536, 148),
    ("megatron-310.1b", 310.1, 2160, 1920, 155),
    ("megatron-529.6b", 529.6, 2520, 2520, 163),
    ("megatron-1008b", 1008.0, 3072, 3072, 163),
]


def gpt(layers, heads, head_size, vocabulary, sequence_length) -> ModelConfig:
    return ModelConfig(
        layers=layers, heads=heads, hidden=heads * head_size, vocabulary=vocabulary, sequence_length=sequence_length
    )


def equation_2_parameters(layers: int, hidden: int, vocabulary: int, sequence_length: int) -> int:
    """Parameters of a GPT by 2104.04473 equation 2: 12lh^2 (1 + 13/(12h) + (V+s)/(12lh)), in whole numbers.

    The final layer norm's 2h are not included; `ModelConfig.parameters` includes them.
    """
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence_length) * hidden


def flops_per_token(model: ModelCosts) -> float:
    """Model FLOPs of one token's forward and backward: for a GPT 72lh^2 (1 + s/(6h) + V/(12lh)), 2205.05198 eq. 8."""
    return 3 * sum(forward_flops(model).values()) / model.sequence_length


def equation_4_days(parameters: float, tokens: float, gpus: int, flops_per_gpu: float) -> float:
    """Days to train on `tokens` tokens by 2104.04473 equation 4, 8TP/(nX), which counts recomputation too."""
    return 8 * tokens * parameters / (gpus * flops_per_gpu) / 86400


def training_days(model: ModelConfig, tokens: float, gpus: int, flops_per_gpu: float) -> float:
    """Days to train on `tokens` tokens at `flops_per_gpu` FLOP/s, counted as in equation 3: table 2's last column."""
    return equation_3_flops(model, 1) * tokens / model.sequence_length / (gpus * flops_per_gpu) / 86400


def hardware_flops_2205(model: ModelConfig, batch: int) -> float:
    """2205.05198 appendix A, selective recomputation: 72 B L s h^2 (1 + s/(3h) + v/(12hL)); its HFU is this over time.

    The paper's model FLOPs have s/(6h), and are `flops_per_step`. (Recomputing both products of attention would add a
    third of its share, s/(4.5h) in all; the paper prints s/(3h).)
    """
    layers, hidden, tokens = model.layers, model.hidden, model.sequence_length
    relative = 1 + tokens / (3 * hidden) + model.vocabulary / (12 * hidden * layers)
    return 72 * batch * layers * tokens * hidden**2 * relative


@pytest.mark.parametrize("name,billions", [row[:2] for row in TABLE_1])
def test_equation_2_gives_the_parameters_of_table_1(name, billions):
    model = preset(name)
    equation_2 = equation_2_parameters(model.layers, model.hidden, model.vocabulary, model.sequence_length)
    # The paper prints one decimal; its 18.4 is 18.45 truncated, not rounded.
    assert abs(equation_2 / 1e9 - billions) < 0.0501
    assert model.parameters == equation_2 + 2 * model.hidden  # the final layer norm is not in equation 2


def test_equation_2_gives_gpt3():
    assert round(equation_2_parameters(96, 12288, 51200, 2048) / 1e9, 1) == 174.6


@given(**SHAPES)
def test_parameters_of_a_gpt_are_equation_2_and_the_final_norm(**shape):
    model = gpt(**shape)
    equation_2 = equation_2_parameters(model.layers, model.hidden, model.vocabulary, model.sequence_length)
    assert model.parameters == equation_2 + 2 * model.hidden
    # as the paper writes it
    layers, hidden, tables = model.layers, model.hidden, model.vocabulary + model.sequence_length
    printed = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + tables / (12 * layers * hidden))
    assert equation_2 == pytest.approx(printed, rel=1e-12)


@given(**SHAPES, batch=st.integers(1, 4096))
def test_equation_3_is_four_times_the_blocks_and_three_times_the_logits(batch, **shape):
    model = gpt(**shape)
    layers, hidden, sequence = model.layers, model.hidden, model.sequence_length
    equation_3 = 96 * batch * sequence * layers * hidden**2
    equation_3 *= 1 + sequence / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
    parts = forward_flops(transformer_costs(model))
    logits = parts.pop("logits")
    assert batch * (4 * sum(parts.values()) + 3 * logits) == pytest.approx(equation_3, rel=1e-12)


@given(**SHAPES)
def test_flops_per_token_is_six_times_the_matmul_weights_and_attention(**shape):
    model = gpt(**shape)
    layers, hidden, sequence = model.layers, model.hidden, model.sequence_length
    weights, found = 12 * layers * hidden**2 + model.vocabulary * hidden, flops_per_token(transformer_costs(model))
    assert found == pytest.approx(6 * weights + 12 * layers * sequence * hidden, rel=1e-12)
    formula = 72 * layers * hidden**2
    formula *= 1 + sequence / (6 * hidden) + model.vocabulary / (12 * layers * hidden)
    assert found == pytest.approx(formula, rel=1e-12)


def test_matmuls_of_llama_are_six_times_its_weights_and_attention():
    model = preset("llama2-7b")
    norms = (2 * model.layers + 1) * model.hidden
    lookups = model.vocabulary * model.hidden
    attention = 12 * model.layers * model.sequence_length * model.hidden
    assert flops_per_token(transformer_costs(model)) == 6 * (model.parameters - norms - lookups) + attention


def test_a_step_is_its_tokens():
    run = RunConfig(preset("tiny"), ParallelConfig(data=2), TrainConfig(global_batch_size=6))
    assert flops_per_step(run) == 6 * run.model.sequence_length * flops_per_token(transformer_costs(run.model))


def test_the_causal_half_of_attention():
    """A mask that hides half of the scores; BERT's hides none."""
    run = RunConfig(preset("llama2-7b"), ParallelConfig(), TrainConfig(global_batch_size=2))
    attention = 12 * run.model.layers * run.model.hidden * run.model.sequence_length**2 * 2
    assert flops_per_step(run) - causal_flops_per_step(run) == attention // 2
    assert f"{0.627 * causal_flops_per_step(run) / flops_per_step(run):.1%}" == "58.3%"
    bert = RunConfig(preset("bert-336m"), ParallelConfig(), TrainConfig())
    assert causal_flops_per_step(bert) == flops_per_step(bert)


@pytest.mark.parametrize(
    "layers,hidden,heads,batch,gpus,seconds,utilisation",
    [
        # 2205.05198 table 5, present work, on A100s; the last row is the text's 8-way data-parallel 530B.
        (48, 6144, 64, 4, 8, 1.10, 41.5),
        (96, 12288, 96, 64, 64, 13.75, 51.4),
        (105, 20480, 128, 280, 280, 37.83, 56.0),
        (128, 25600, 160, 512, 512, 71.49, 56.3),
        (105, 20480, 128, 2240, 2240, 39.15, 54.2),
    ],
)
def test_published_times_give_the_published_model_flops_utilisation(
    layers, hidden, heads, batch, gpus, seconds, utilisation
):
    model = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocabulary=51200, sequence_length=2048)
    run = RunConfig(model, ParallelConfig(), TrainConfig(global_batch_size=batch))
    # the seconds are printed to 10 ms, which is half a percent of the first row's
    assert 100 * flops_per_step(run) / (seconds * gpus * 312e12) == pytest.approx(utilisation, rel=0.006)


@pytest.mark.parametrize(
    "parameters,tokens,gpus,teraflops,days",
    [(174.6e9, 300e9, 1024, 140, 34), (1008e9, 450e9, 3072, 163, 84)],  # 2104.04473 section 5.1
)
def test_equation_4_gives_the_days_of_the_text(parameters, tokens, gpus, teraflops, days):
    assert round(equation_4_days(parameters, tokens, gpus, teraflops * 1e12)) == days


@pytest.mark.parametrize(
    "name,gpus,teraflops,days",
    [
        # 2104.04473 table 2: ZeRO-3, then PTD-P
        ("gpt3-175b", 384, 144, 90),
        ("gpt3-175b", 768, 88, 74),
        ("gpt3-175b", 1536, 44, 74),
        ("megatron-529.6b", 640, 138, 169),
        ("megatron-529.6b", 1120, 98, 137),
        ("megatron-529.6b", 2240, 48, 140),
        ("gpt3-175b", 384, 153, 84),
        ("gpt3-175b", 768, 149, 43),
        ("gpt3-175b", 1536, 141, 23),
        ("megatron-529.6b", 560, 171, 156),
        ("megatron-529.6b", 1120, 167, 80),
        ("megatron-529.6b", 2240, 159, 42),
    ],
)
def test_equation_3_gives_the_days_of_table_2(name, gpus, teraflops, days):
    low, high = (training_days(preset(name), 300e9, gpus, (teraflops + half) * 1e12) for half in (0.5, -0.5))
    assert low - 0.5 <= days <= high + 0.5  # both columns are rounded


@pytest.mark.parametrize(
    "layers,hidden,heads,gpus,batch,seconds,hardware",
    [
        # 2205.05198 table 5
        (48, 6144, 64, 8, 4, 1.10, 43.7),
        (96, 12288, 96, 64, 64, 13.75, 52.8),
        (105, 20480, 128, 280, 280, 37.83, 57.0),
        (128, 25600, 160, 512, 512, 71.49, 57.0),
    ],
)
def test_published_times_give_the_published_hardware_utilisation(layers, hidden, heads, gpus, batch, seconds, hardware):
    model = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocabulary=51200, sequence_length=2048)
    assert 100 * hardware_flops_2205(model, batch) / (seconds * gpus * 312e12) == pytest.approx(hardware, rel=0.006)


@given(**SHAPES)
def test_recomputed_matmuls_are_counted(**shape):
    """Full recomputation adds a forward of all matmuls but the down projection; equation 3 includes that one too."""
    model = gpt(**shape)
    run = lambda mode: RunConfig(model, ParallelConfig(recompute=mode), TrainConfig(global_batch_size=2))  # noqa: E731
    forward = forward_flops(transformer_costs(model))
    assert hardware_flops_per_step(run("none")) == flops_per_step(run("none"))
    assert hardware_flops_per_step(run("selective")) - flops_per_step(run("none")) == 2 * forward["attention_scores"]
    full = hardware_flops_per_step(run("full")) + 2 * forward["mlp_out"]
    assert full == pytest.approx(equation_3_flops(model, 2), rel=1e-12)


def test_scores_that_masks_hide_are_counted():
    """Mistral 7B: 8,192 tokens, each of which sees at most 4,096: 3/4 of the causal half."""
    windowed, whole = (transformer_costs(preset("mistral-7b")), transformer_costs(preset("llama3-8b")))
    assert forward_flops(windowed)["attention_scores"] == forward_flops(whole)["attention_scores"]
    assert windowed.attention.pairs(8192) == 3 / 4 * whole.attention.pairs(8192) == 3 / 8 * 8192**2


@pytest.mark.parametrize(
    ("name", "square_of_heads", "expert"),
    [  # a layer's elements: queries, keys, values and output; an expert's three matrices
        ("mixtral-8x7b", 4096 * (4096 + 2 * 1024) + 4096 * 4096, 3 * 4096 * 14336),
        ("qwen3-30b-a3b", 2048 * (4096 + 2 * 512) + 4096 * 2048, 3 * 2048 * 768),
        ("olmoe-1b-7b", 4 * 2048 * 2048, 3 * 2048 * 1024),
    ],
)
def test_sparse_models_count_the_experts_of_a_token(name, square_of_heads, expert):
    """Six operations for each weight of a matmul that a token passes, and those of attention's scores and values."""
    model = preset(name)
    layer = square_of_heads + model.hidden * model.experts + model.experts_per_token * expert
    weights = model.layers * layer + model.hidden * model.vocabulary
    scores = 2 * model.layers * model.sequence_length * model.heads * model.head_dimension
    assert flops_per_token(transformer_costs(model)) == 6 * (weights + scores)
    norms_and_input = model.active_parameters - weights
    assert 0 < norms_and_input - model.hidden * model.vocabulary < model.layers * 20_000

"""The presets and their recipes, compared with the papers."""

import re

import pytest

from experiments import bert, gpt2, gpt3
from megajax.config import PRESETS, ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig, preset
from megajax.config.cli import parse
from megajax.config.presets import BERTS
from megajax.config.released import RELEASED
from megajax.config.released_others import RELEASED_OTHERS

EVERY = RELEASED | RELEASED_OTHERS


def itemised_parameters(model: ModelConfig) -> int:
    """Parameters of a GPT, array by array."""
    hidden = model.hidden
    block = {
        "attention norm": 2 * hidden,
        "query, key, value": hidden * 3 * hidden + 3 * hidden,
        "attention output": hidden * hidden + hidden,
        "mlp norm": 2 * hidden,
        "mlp in": hidden * 4 * hidden + 4 * hidden,
        "mlp out": 4 * hidden * hidden + hidden,
    }
    tables = model.vocabulary * hidden + model.sequence_length * hidden
    return model.layers * sum(block.values()) + tables + 2 * hidden


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in {"moe-tiny", *EVERY, *BERTS}])
def test_parameters_of_a_gpt_are_the_sum_of_its_arrays(name):
    assert preset(name).parameters == itemised_parameters(preset(name))


@pytest.mark.parametrize(
    "name,count",
    [
        # as counted in the released checkpoints
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        # as transformers counts them: AutoModelForCausalLM.from_config on the meta device, with the released config.json
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
        ("gemma-2b", 2_506_172_416),
        ("gemma-7b", 8_537_680_896),
        ("gemma2-2b", 2_614_341_888),
        ("gemma2-9b", 9_241_705_984),
        ("gemma3-1b", 999_885_952),
        ("olmo2-7b", 7_298_617_344),
        ("olmo3-7b", 7_298_011_136),
        ("phi3-mini", 3_821_079_552),
        ("smollm3-3b", 3_075_098_624),
        ("glm4-9b", 9_400_279_040),
        ("granite3-2b", 2_533_531_648),
        ("command-r7b", 8_028_033_024),
        ("starcoder2-3b", 3_030_371_328),
        ("modernbert-base", 149_655_232),
        ("modernbert-large", 395_881_664),
        ("nanochat-d20", 560_988_160),
        ("nanochat-d32", 1_879_048_192),
        ("ministral-8b", 8_019_808_256),
        ("ministral3-8b", 8_489_553_920),
        ("glm4.5-air", 106_852_245_504),
        ("mistral-nemo-12b", 12_247_782_400),
        ("mistral-small-24b", 23_572_403_200),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen2-57b-a14b", 57_408_658_944),
        ("mamba2-2.7b", 2_702_599_680),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("nemotron-h-8b", 8_100_852_736),
        ("nemotron3-nano-30b-a3b", 31_577_937_344),
        ("granite4-h-micro", 3_191_396_096),
        ("granite4-h-tiny", 6_939_037_248),
        ("llama4-scout", 107_769_861_120),
        ("llama4-maverick", 400_711_848_960),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_parameters_of_released_models(name, count):
    assert preset(name).parameters == count


@pytest.mark.parametrize(
    ("name", "count", "total", "active"),
    [
        # count: as transformers counts them, likewise; total and active in billions: as the model cards print them
        ("mixtral-8x7b", 46_702_792_704, "46.7", "12.9"),
        ("mixtral-8x22b", 140_620_634_112, "141", "39"),
        ("qwen3-30b-a3b", 30_532_122_624, "30.5", "3.3"),
        ("qwen3-235b-a22b", 235_093_634_560, "235", "22"),
        ("olmoe-1b-7b", 6_919_161_856, "6.9", "1.3"),
    ],
)
def test_parameters_of_sparse_models(name, count, total, active):
    model = preset(name)
    assert model.parameters == count
    for parameters, shown in ((model.parameters, total), (model.active_parameters, active)):
        last_digit = 10.0 ** -len(shown.partition(".")[2])
        assert abs(parameters / 1e9 - float(shown)) < last_digit  # Qwen's 3.35 billion are printed as 3.3


@pytest.mark.parametrize(
    ("name", "count", "total", "active"),
    [
        # total: as the model cards print it (Kimi K2's report has 1.04 trillion); active: likewise, without the embedding
        ("deepseek-v2-lite", 15_706_484_224, "15.7", "2.4"),
        ("deepseek-v3", 671_026_404_352, "671", "37"),
        ("kimi-k2", 1_026_408_209_408, "1026", "32"),
    ],
)
def test_parameters_of_models_with_latent_attention(name, count, total, active):
    model = preset(name)
    assert model.parameters == count
    used = model.active_parameters - model.vocabulary * model.hidden
    for parameters, shown in ((model.parameters, total), (used, active)):
        assert abs(parameters / 1e9 - float(shown)) < 10.0 ** -len(shown.partition(".")[2])


def test_the_other_released_models_are_dense():
    sparse = {name for name in RELEASED if preset(name).experts}
    assert sparse == {"mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "olmoe-1b-7b"}


@pytest.mark.parametrize(
    "name",
    [name for name in PRESETS if name not in EVERY and re.search(r"-[\d.]+[mb](-2019)?$", name)],
)
def test_published_names_tell_the_size(name):
    number, unit = re.search(r"-([\d.]+)([mb])", name).groups()
    size = float(number) * {"m": 1e6, "b": 1e9}[unit]
    assert preset(name).parameters == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_legal_on_one_device(name):
    RunConfig(preset(name), ParallelConfig(), TrainConfig()).validate(device_count=1)


# 2104.04473 table 1: tensor, pipe, GPUs, batch, for the runs the paper timed.
TABLE_1 = {
    "megatron-1.7b": (1, 1, 32, 512),
    "megatron-3.6b": (2, 1, 64, 512),
    "megatron-7.5b": (4, 1, 128, 512),
    "megatron-18.4b": (8, 1, 256, 1024),
    "megatron-39.1b": (8, 2, 512, 1536),
    "megatron-76.1b": (8, 4, 1024, 1792),
    "megatron-145.6b": (8, 8, 1536, 2304),
    "megatron-310.1b": (8, 16, 1920, 2160),
    "megatron-529.6b": (8, 35, 2520, 2520),
    "megatron-1008b": (8, 64, 3072, 3072),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_the_layouts_of_table_1_are_legal(name):
    tensor, pipe, devices, batch = TABLE_1[name]
    parallel = ParallelConfig(data=devices // (tensor * pipe), pipe=pipe, tensor=tensor)
    run = RunConfig(preset(name), parallel, TrainConfig(global_batch_size=batch))
    run.validate(devices)


def test_aliases_are_the_same_models():
    assert preset("gpt3-530b") is preset("megatron-529.6b")
    assert preset("gpt3-1t") is preset("megatron-1008b")


def test_an_unknown_preset_names_the_near_ones():
    with pytest.raises(ConfigError, match=r"model = 'gpt3-175' is not a preset: did you mean .*gpt3-175b.*--model"):
        preset("gpt3-175")
    with pytest.raises(ConfigError, match="choose from tiny, gpt2,"):
        preset("zzz")


def recipe_of(model: str, experiment=gpt3.EXPERIMENT) -> RunConfig:
    """The run of `--model MODEL` on one device."""
    run = parse(["--model", model], experiment).run(1, "bf16")
    run.validate(1)
    return run


# 2005.14165 table 2.1: batch in tokens and learning rate; 300 billion tokens for all of them.
GPT3 = {
    "gpt3-125m": (0.5e6, 6.0e-4),
    "gpt3-350m": (0.5e6, 3.0e-4),
    "gpt3-760m": (0.5e6, 2.5e-4),
    "gpt3-1.3b": (1e6, 2.0e-4),
    "gpt3-2.7b": (1e6, 1.6e-4),
    "gpt3-6.7b": (2e6, 1.2e-4),
    "gpt3-13b": (2e6, 1.0e-4),
    "gpt3-175b": (3.2e6, 0.6e-4),
}


@pytest.mark.parametrize("model", GPT3)
def test_gpt3_has_the_papers_recipe(model):
    run = recipe_of(model)
    batch, rate = GPT3[model]
    train, tokens = run.train, run.model.sequence_length
    assert train.global_batch_size * tokens == pytest.approx(batch, rel=0.05)
    assert run.total_samples * tokens == pytest.approx(300e9, rel=1e-3)
    assert (train.learning_rate, train.minimum_learning_rate) == (rate, pytest.approx(rate / 10))
    assert train.warmup_samples * tokens == pytest.approx(375e6, rel=1e-3)
    assert train.decay_samples * tokens == pytest.approx(260e9, rel=1e-3)
    assert (train.beta1, train.beta2, train.epsilon, train.weight_decay, train.clip_norm) == (0.9, 0.95, 1e-8, 0.1, 1.0)
    assert train.batch_ramp[0] * tokens == pytest.approx(32e3, rel=0.05)
    assert 4e9 <= train.batch_ramp[2] * tokens * 1.001 and train.batch_ramp[2] * tokens <= 12.01e9


def test_a_short_run_scales_the_lengths_of_its_recipe():
    run = parse("--model gpt3-1.3b --steps 1000".split(), gpt3.EXPERIMENT).run(8, "bf16")
    run.validate(8)
    whole = gpt3.RECIPES["gpt3-1.3b"]
    share = 1000 / whole["steps"]
    assert run.train.decay_samples == pytest.approx(share * whole["decay_samples"], rel=1e-3)
    assert run.train.batch_ramp == (16, 16, pytest.approx(share * whole["batch_ramp"][2], rel=1e-3))
    run = parse("--model gpt3-1.3b --batch-ramp none".split(), gpt3.EXPERIMENT).run(8, "bf16")
    assert run.train.batch_ramp == ()
    parse("--model gpt3-1.3b --global-batch-size 8".split(), gpt3.EXPERIMENT).run(8, "bf16").validate(8)


@pytest.mark.parametrize("model", [name for name in PRESETS if name not in ("tiny", "moe-tiny", "bert-tiny")])
def test_no_published_model_is_trained_with_the_toys_settings(model):
    request = parse(["--model", model], gpt3.EXPERIMENT)
    run = request.run(1, "bf16")
    run.validate(1)
    assert run.train.learning_rate <= 6e-4 and run.train.global_batch_size * run.model.sequence_length >= 0.5e6
    assert run.train.steps > 10_000 and request.output.save_every in (500, 5000) and request.sample is None


LLAMA3 = [name for name in RELEASED if name.startswith(("llama3-", "llama3.1-"))]


@pytest.mark.parametrize("model", [name for name in RELEASED if name not in LLAMA3])
def test_llama2_has_the_papers_recipe(model):
    """2307.09288 section 2.2; also for models whose recipe is not published."""
    run = recipe_of(model)
    train, tokens = run.train, run.model.sequence_length
    assert train.global_batch_size * tokens == pytest.approx(4e6, rel=0.05)
    assert run.total_samples * tokens == pytest.approx(2e12, rel=1e-3)
    rate = 1.5e-4 if model == "llama2-70b" else 3e-4
    assert (train.learning_rate, train.minimum_learning_rate) == (rate, pytest.approx(rate / 10))
    assert (train.beta1, train.beta2, train.epsilon, train.weight_decay, train.clip_norm) == (0.9, 0.95, 1e-5, 0.1, 1.0)
    assert (train.warmup_steps, train.learning_rate_decay) == (2000, "cosine")


@pytest.mark.parametrize("model", LLAMA3)
def test_llama3_has_the_papers_recipe(model):
    """2407.21783 table 3 (rates), section 3.4.1 (8,000 steps of warm-up, the rate falls to a hundredth, 16M tokens)."""
    run = recipe_of(model)
    train, tokens = run.train, run.model.sequence_length
    assert train.global_batch_size * tokens == pytest.approx(16e6, rel=0.05)
    assert run.total_samples * tokens == pytest.approx(15.6e12, rel=1e-3)
    rate = {"8b": 3e-4, "70b": 1.5e-4, "405b": 8e-5}[model.partition("-")[2]]
    assert (train.learning_rate, train.minimum_learning_rate) == (rate, pytest.approx(rate / 100))
    assert (train.warmup_steps, train.learning_rate_decay) == (8000, "cosine")


MEGATRON_2019 = [name for name in PRESETS if name.startswith("gpt2") or name.endswith("-2019")]


@pytest.mark.parametrize("experiment", [gpt2.EXPERIMENT, gpt3.EXPERIMENT], ids=["gpt2", "gpt3"])
@pytest.mark.parametrize("model", MEGATRON_2019)
def test_gpt2_has_the_first_papers_recipe(model, experiment):
    """1909.08053 section 4.2: 512 samples, 300k steps, 1.5e-4 after 3k, cosine to 1e-5, decay 0.01, clip 1, dropout 0.1."""
    run = recipe_of(model, experiment)
    train = run.train
    assert (train.global_batch_size, train.steps, train.warmup_steps) == (512, 300_000, 3000)
    assert (train.learning_rate, train.minimum_learning_rate, train.learning_rate_decay) == (1.5e-4, 1e-5, "cosine")
    assert (train.weight_decay, train.clip_norm, run.parallel.recompute) == (0.01, 1.0, "full")
    assert (run.model.dropout, run.model.sequence_length) == (0.1, 1024)
    assert run.model == preset(model)


@pytest.mark.parametrize("model", [*TABLE_1, "gpt3-530b", "gpt3-1t"])
def test_the_models_of_table_1_have_its_batch_and_gpt3_175bs_rates(model):
    """2104.04473 table 1 gives their batch size; its section 5.1 assumes 450 billion tokens for the 1T model."""
    run, largest = recipe_of(model), recipe_of("gpt3-175b").train
    name = {"gpt3-530b": "megatron-529.6b", "gpt3-1t": "megatron-1008b"}.get(model, model)
    assert run.train.global_batch_size == TABLE_1[name][3]
    tokens = 450e9 if name == "megatron-1008b" else 300e9
    assert run.total_samples * run.model.sequence_length == pytest.approx(tokens, rel=1e-3)
    for field in ("learning_rate", "minimum_learning_rate", "beta1", "beta2", "weight_decay", "clip_norm"):
        assert getattr(run.train, field) == getattr(largest, field)
    assert run.train.batch_ramp == ()


@pytest.mark.parametrize("experiment", [bert.EXPERIMENT, gpt3.EXPERIMENT], ids=["bert", "gpt3"])
@pytest.mark.parametrize("model", ["bert-336m", "bert-1.3b", "bert-3.9b"])
def test_bert_has_the_first_papers_recipe(model, experiment):
    """1909.08053 section 5.3: 1,024 samples, 1e-4 after 10k steps, linear decay over 2M; 512 tokens, dropout 0.1."""
    run = recipe_of(model, experiment)
    train = run.train
    assert (train.global_batch_size, train.steps, train.warmup_steps) == (1024, 2_000_000, 10_000)
    assert (train.learning_rate, train.minimum_learning_rate, train.learning_rate_decay) == (1e-4, 0.0, "linear")
    assert (train.weight_decay, train.clip_norm, train.beta1, train.beta2) == (0.01, 1.0, 0.9, 0.999)
    assert (run.model.dropout, run.model.sequence_length, run.model.post_norm) == (0.1, 512, False)
    shape = run.model.layers, run.model.hidden, run.model.heads
    assert shape == {"336m": (24, 1024, 16), "1.3b": (24, 2048, 32), "3.9b": (48, 2560, 40)}[model.partition("-")[2]]


def test_the_recipe_of_every_preset_is_checked_here():
    checked = {*GPT3, *TABLE_1, *MEGATRON_2019, *EVERY, "gpt3-530b", "gpt3-1t", "tiny", "moe-tiny", *BERTS}
    assert checked == set(PRESETS)
    toy = recipe_of("tiny").train
    assert (toy.steps, toy.global_batch_size, toy.learning_rate) == (500, 16, 4e-3)

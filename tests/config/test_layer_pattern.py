"""Kinds of layers by a pattern: its language, the fields of a kind, illegal ones, and what follows from them."""

import dataclasses

import pytest

from megajax.config import ConfigError, ParallelConfig, preset
from megajax.config.cli import parse
from megajax.config.layer_pattern import layer_pattern_of, variant_numbers, variants, words_of
from megajax.config.toml import config_tables, toml_text
from megajax.estimate import model_costs
from megajax.models.interface import model_class
from megajax.ops.attention_choice import mask_of
from tests import small

MIXED = dataclasses.replace(
    small.LLAMA,
    layer_pattern="local*2,global",
    kind_fields=("local.sliding_window=5", "local.rotary_base=100.0", "global.rotary_scaling=linear")
    + ("global.rotary_factor=4.0",),
)


def test_each_layer_has_the_fields_of_its_kind():
    MIXED.validate()
    local, whole = variants(MIXED)
    assert variant_numbers(MIXED) == (0, 0, 1, 0, 0, 1, 0, 0)
    assert (local.sliding_window, local.rotary_base, local.rotary_scaling) == (5, 100.0, "none")
    assert (whole.sliding_window, whole.rotary_base, whole.rotary_factor) == (None, 10000.0, 4.0)
    assert MIXED.attention_windows == (5, None)
    assert MIXED.parameters == small.LLAMA.parameters == model_costs(MIXED).parameters


def test_kinds_that_are_alike_are_one():
    same = dataclasses.replace(small.LLAMA, layer_pattern="a,b", kind_fields=("a.sliding_window=none",))
    assert len(variants(same)) == 1 and same.attention_windows == (None,)


@pytest.mark.parametrize(
    ("kinds", "short"),
    [("aaab" * 3, "a*3,b"), ("aaabaa", "a*3,b"), ("aaaa", "a"), ("abba", "a,b*2"), ("ab", "a,b"), ("aab", "a*2,b")],
)
def test_the_shortest_pattern(kinds, short):
    assert layer_pattern_of(kinds) == short


def test_words_of_fields():
    fields = {"a": {"sliding_window": None, "rotary_base": 1e6}, "b": {"rotary_truncate": False}}
    assert words_of(fields) == ("a.sliding_window=none", "a.rotary_base=1000000.0", "b.rotary_truncate=False")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_pattern": "local*0"}, "has 'local\\*0', which is no kind: pass --layer-pattern"),
        ({"layers": 20000}, "layers = 20000 is above 10000"),
        ({"layer_pattern": "local,,global"}, "has '', which is no kind"),
        ({"layer_pattern": "none"}, "is of kinds, and layer_pattern = none: pass --layer-pattern, or omit"),
        (
            {"kind_fields": ()},
            "has kinds that differ in nothing: pass --kind-fields local.sliding_window=1024",
        ),
        ({"kind_fields": ("other.sliding_window=4",)}, "must be KIND.FIELD=VALUE of a kind of layer_pattern"),
        ({"kind_fields": ("local.hidden=4",)}, "hidden cannot differ between kinds"),
        ({"kind_fields": ("local.sliding_window=x",)}, "sliding_window must be a whole number"),
        ({"kind_fields": ("local.sliding_window=0",)}, "sliding_window must be a whole number, 1 or more"),
        ({"kind_fields": ("local.rotary_scaling=yarn",)}, "needs a rotary_factor of 1 or more"),
        ({"kind_fields": ("local.positions=learned",)}, "kinds with learned positions"),
        ({"positions": "none", "kind_fields": ("local.positions=rotary",)}, "a kind has rotary positions"),
    ],
)
def test_illegal_fields(changes, message):
    with pytest.raises(ConfigError, match=message) as found:
        dataclasses.replace(MIXED, **changes).validate()
    assert "\n" not in str(found.value)


def test_the_command_line_and_files_have_them(tmp_path):
    words = ["--model", "llama3.2-1b", "--layer-pattern", "local*3,global"]
    words += ["--kind-fields", "local.sliding_window=512,global.positions=none"]
    request = parse(words, "", {"model": "tiny"})
    run = request.run(8, "bf16")
    assert run.model.kind_fields == ("local.sliding_window=512", "global.positions=none")
    path = tmp_path / "config.toml"
    path.write_text(toml_text(config_tables(run, request.output, request.others), ""))
    again = parse(["--config", str(path)], "", {"model": "tiny"}).run(8, "bf16")
    assert again.model == run.model


def test_windows_are_counted_by_layer():
    """A third of the layers sees all."""
    costs = model_costs(MIXED)
    pairs = costs.attention.pairs(16)
    assert pairs == pytest.approx((6 * 5 * (32 - 5) / 2 + 2 * 16 * 16 / 2) / 8)
    fusable = model_class(MIXED).fusable_attention(MIXED)
    assert fusable.window is None and mask_of(False, fusable) == mask_of(False, costs.attention) == "windows"


def test_chunks_are_counted_by_layer():
    """16 tokens are three chunks of 5 and one of 1; every fourth layer sees all."""
    words = ("chunked.chunked_attention=5", "global.positions=none")
    model = dataclasses.replace(MIXED, layer_pattern="chunked*3,global", kind_fields=words)
    attention = model_costs(model).attention
    chunked = 3 * 25 / 2 + 1 / 2
    assert attention.pairs(16) == pytest.approx((3 * chunked + 16 * 16 / 2) / 4)
    assert mask_of(False, model_class(model).fusable_attention(model)) == mask_of(False, attention) == "windows"
    alike = dataclasses.replace(small.LLAMA, chunked_attention=5, sliding_window=2)
    alike.validate()
    assert model_costs(alike).attention.pairs(16) == 3 * 2 * (10 - 2) / 2 + 1 / 2
    assert mask_of(False, model_class(alike).fusable_attention(alike)) == "windows"
    whole = dataclasses.replace(alike, chunked_attention=alike.sequence_length)
    assert whole.attention_chunks == (None,) and mask_of(False, model_costs(whole).attention) is None


def test_a_kind_without_positions_has_no_scaling():
    """The model's is of the layers that rotate."""
    fields = {"rotary_scaling": "llama3", "rotary_factor": 4.0}
    dataclasses.replace(small.LLAMA, layer_pattern="a,b", kind_fields=("b.positions=none",), **fields).validate()


def test_rings_have_no_caps():
    model = dataclasses.replace(MIXED, attention_softcap=5.0)
    assert mask_of(True, model_costs(model).attention) == "attention_softcap"
    with pytest.raises(
        ConfigError, match="attention_softcap = .* is not computed by the kernels of attention .*pass --context 1"
    ):
        model.check_parallel(ParallelConfig(context=2))
    MIXED.check_parallel(ParallelConfig(context=2))


def test_kernels_and_rings_have_sinks():
    model = dataclasses.replace(MIXED, attention_sinks=True)
    assert mask_of(False, model_costs(model).attention) == "windows"
    model.check_parallel(ParallelConfig(context=2))


def test_presets_with_kinds():
    model = preset("gemma3-1b")
    assert [variants(model)[n].sliding_window for n in variant_numbers(model)[:7]] == [512] * 5 + [None, 512]

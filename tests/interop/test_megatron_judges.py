"""Checkpoints that megatron-core wrote (make_megatron_golden.py), read with torch; `pytest -m slow`, with torch installed.

megatron-core itself is not needed: the logits of its models are golden.
"""

import io
import os
import pathlib
import pickle
import re
import shutil
import zipfile

import numpy as np
import pytest

from megajax.interop.megatron import __main__ as megatron
from megajax.interop.megatron.torch_files import Unread, load
from tests.interop.hugging_face import convert, golden, logits_of, restored, training_of
from tests.interop.make_golden import tokens
from tests.interop.make_megatron_golden import ARCHIVE, CASES, DIRECTORY

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow
TOKENIZER = golden("llama") / "tokenizer.json"
FILE = "model_optim_rng.pt"


def checkpoint(case: str, to: pathlib.Path) -> pathlib.Path:
    """A golden directory of --save, and that of its iteration."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(to, [name for name in archive.namelist() if name.startswith(f"{case}/")])
    return to / case


def run(save: pathlib.Path, to: pathlib.Path, *options) -> int:
    """The exit code of an import."""
    words = ("import", save, "--run-dir", to, *(options or ("--tokenizer", TOKENIZER)))
    return megatron.main([str(word) for word in words])


def check_logits(save: pathlib.Path, to: pathlib.Path, case: str) -> None:
    """Compares the logits of all positions with megatron-core's."""
    assert run(save, to) == 0
    from megajax.checkpoint import reader
    from megajax.config import ModelConfig

    stored = reader.read_meta(to / "checkpoints" / "step_00000000")["config"]["model"]
    model = ModelConfig(**{key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()})
    training = training_of(model, pipe=2)
    found = logits_of(training, restored(to, training).params)
    np.testing.assert_allclose(found, np.load(DIRECTORY / f"{case}.npy"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_megatrons(case, tmp_path):
    check_logits(checkpoint(case, tmp_path), tmp_path / "run", case)


@pytest.mark.parametrize("case", ["gpt", "rotary"])
def test_transformers_reads_an_export_of_an_import(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert run(checkpoint(case, tmp_path), tmp_path / "run") == 0
    assert convert("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens())).logits.float().numpy()
    np.testing.assert_allclose(logits, np.load(DIRECTORY / f"{case}.npy"), rtol=0, atol=1e-4)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes()


def change(path: pathlib.Path, how) -> None:
    """Saves a rank's file again, or common.pt, with `how` applied to its dictionary."""
    state = load(path)
    state.pop("rng_state", None)
    for name, value in list(vars(state["args"]).items()):
        if isinstance(value, Unread):
            delattr(state["args"], name)
    how(state)
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def change_all(save: pathlib.Path, how) -> pathlib.Path:
    for path in save.rglob(FILE):
        change(path, how)
    return save


def models(state) -> list[str]:
    return [key for key in state if key.startswith("model")]


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_checkpoints_before_megatron_core(version, tmp_path):
    """The names, nested dictionaries and orders of rows of Megatron-LM's own layers, written here by hand."""
    names = {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }

    def old(state):
        state["checkpoint_version"] = version
        for key in models(state):
            was, inner, embedding, top = state[key], {}, {}, {}
            for name, value in was.items():
                if not torch.is_tensor(value):
                    continue
                if "linear_qkv" in name and version < 2:  # 2 heads of a rank, of 4 elements
                    rest = value.shape[1:]
                    value = value.view(2, 3, 4, *rest)
                    value = value.transpose(0, 1) if version < 1 else value.transpose(1, 2)
                    value = value.reshape(24, *rest)
                kind = name.rpartition(".")[2]
                if name.startswith("embedding."):
                    embedding[name.split(".")[1]] = {kind: value}
                elif name.startswith("decoder.final_layernorm"):
                    inner[f"final_layernorm.{kind}"] = value
                elif name == "output_layer.weight":
                    top["word_embeddings_for_head"] = {kind: value}
                else:
                    _, _, layer, rest = name.split(".", 3)
                    inner[f"layers.{layer}.{names[rest.rpartition('.')[0]]}.{kind}"] = value
            parts = {"transformer": inner} | ({"embedding": embedding} if embedding else {})
            state[key] = {"language_model": parts, **top}

    check_logits(change_all(checkpoint("gpt", tmp_path), old), tmp_path / "run", "gpt")


def test_norms_inside_linear_layers_and_without_their_one(tmp_path):
    """TransformerEngine's names, with their extra states; and --apply-layernorm-1p."""
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }

    def fuse(state):
        state["args"].apply_layernorm_1p = True
        for key in models(state):
            found = {"decoder.layers.0.self_attention.core_attention._extra_state": io.BytesIO(b"x")}
            for name, value in state[key].items():
                if "layernorm.weight" in name:
                    value = value.float() - 1
                for old, new in names.items():
                    name = name.replace(old, new)
                found[name] = value
            state[key] = found

    check_logits(change_all(checkpoint("uneven", tmp_path), fuse), tmp_path / "run", "uneven")


def test_one_iteration_and_the_sequence_length(tmp_path, capsys):
    save = checkpoint("gpt", tmp_path)
    options = ("--tokenizer", TOKENIZER, "--sequence-length", 24, "--vocabulary", 80)
    assert run(save / "iter_0000007", tmp_path / "run", *options) == 0
    said = capsys.readouterr().out
    assert "24 tokens a sample" in said and "not the optimizer's state" in said
    (save / "latest_checkpointed_iteration.txt").write_text("9")
    assert run(save, tmp_path / "again", "--tokenizer", TOKENIZER, "--step", "7") == 0


class Malicious:
    """Makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def rank_file(save: pathlib.Path, rank: str = "mp_rank_01_001") -> pathlib.Path:
    return save / "iter_0000007" / rank / FILE


def truncate(path: pathlib.Path, count: int = 3000) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def edit_metadata(save: pathlib.Path, how) -> None:
    """Pickles .metadata again, with `how` applied; the golden one is of torch 2.15, which older ones cannot read."""
    pytest.importorskip("torch", minversion="2.15")
    path = save / "iter_0000007" / ".metadata"
    found = pickle.loads(path.read_bytes())
    how(found)
    path.write_bytes(pickle.dumps(found))


def args_of(**changes):
    def how(state):
        vars(state["args"]).update(changes)

    return how


def in_model(how):
    """`how` applied to the dictionary of the first virtual stage."""
    return lambda state: how(state[models(state)[0]])


def shards(save: pathlib.Path) -> list[pathlib.Path]:
    return sorted((save / "iter_0000007").glob("*.distcp"))


FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
BAD = {  # (case, what is wrong, words of the message)
    "missing rank": (
        "gpt",
        lambda d: rank_file(d).unlink(),
        r"cannot read .*mp_rank_01_001/model_optim_rng.pt: No such",
    ),
    "missing directory": (
        "gpt",
        lambda d: shutil.rmtree(rank_file(d).parent),
        "cannot read .*mp_rank_01_001/model_optim",
    ),
    "extra rank": (
        "gpt",
        lambda d: shutil.copytree(rank_file(d).parent, rank_file(d, "mp_rank_02_001").parent),
        "has mp_rank_02_001, but its args say tensor_model_parallel_size = 2",
    ),
    "truncated rank": (
        "gpt",
        lambda d: truncate(rank_file(d)),
        "mp_rank_01_001/model_optim_rng.pt is truncated, damaged",
    ),
    "empty rank": (
        "gpt",
        lambda d: rank_file(d).write_bytes(b""),
        "mp_rank_01_001/model_optim_rng.pt is truncated, damaged",
    ),
    "a function": (
        "gpt",
        lambda d: change_all(d, lambda state: state.update(x=Malicious(d.parent / "made"))),
        r"names (posix|nt|os).mkdir, which Megatron-LM's checkpoints do not have: loading it could run code",
    ),
    "an unknown class": (
        "gpt",
        lambda d: change_all(d, lambda state: state.update(x=Malicious)),
        "names tests.interop.test_megatron_judges.Malicious, which",
    ),
    "experts": ("gpt", lambda d: change_all(d, args_of(num_experts=4)), "args: num_experts = 4 is not supported"),
    "no args": ("gpt", lambda d: change_all(d, lambda state: state.pop("args")), "has no args of Megatron-LM"),
    "other sizes": (
        "gpt",
        lambda d: change_all(d, args_of(ffn_hidden_size=32)),
        r"linear_fc1.weight has shape \(24, 16\), and this model's is \(32, 16\)",
    ),
    "other layers": ("gpt", lambda d: change_all(d, args_of(num_layers=5)), "have 4 layers in all, .* num_layers = 5"),
    "a left-over tensor": (
        "gpt",
        lambda d: change_all(d, in_model(lambda m: m.update({"decoder.layers.0.mlp.router.weight": torch.zeros(3)}))),
        "has a tensor decoder.layers.0.mlp.router.weight, which megatron with this configuration does not",
    ),
    "a missing tensor": (
        "gpt",
        lambda d: change_all(d, in_model(lambda m: m.pop(FC2))),
        f"has no tensor {FC2}: did you",
    ),
    "a tensor of one rank only": (
        "gpt",
        lambda d: change(rank_file(d, "mp_rank_01_000"), in_model(lambda m: m.pop(FC2))),
        f"only 1 of 2 ranks have {FC2}",
    ),
    "integers": (
        "gpt",
        lambda d: change_all(d, in_model(lambda m: m.update({FC2: m[FC2].to(torch.int8)}))),
        f"{FC2} is of torch.int8: only fp32, bf16 and fp16",
    ),
    "missing shards": ("rotary", lambda d: shards(d)[1].unlink(), "cannot read .*distcp: No such file"),
    "truncated shards": (
        "rotary",
        lambda d: truncate(shards(d)[0]),
        "distcp is truncated: it has .* bytes of at least",
    ),
    "damaged shards": (
        "rotary",
        lambda d: [one.write_bytes(bytes(one.stat().st_size)) for one in shards(d)],
        "iter_0000007: .* is damaged",
    ),
    "no common.pt": (
        "rotary",
        lambda d: (d / "iter_0000007" / "common.pt").unlink(),
        "cannot read .*common.pt: No such",
    ),
    "no .metadata": (
        "rotary",
        lambda d: (d / "iter_0000007" / ".metadata").unlink(),
        "cannot read .*.metadata: No such",
    ),
    "a function in .metadata": (
        "rotary",
        lambda d: edit_metadata(d, lambda m: setattr(m, "planner_data", Malicious(d.parent / "made"))),
        r".metadata names (posix|nt|os).mkdir, which Megatron-LM's checkpoints do not have",
    ),
    "an absent shard in .metadata": (
        "rotary",
        lambda d: edit_metadata(d, lambda m: m.state_dict_metadata["output_layer.weight"].chunks.pop()),
        r"output_layer.weight has 768 of 1536 elements",
    ),
    "torch_dcp": (
        "rotary",
        lambda d: (d / "iter_0000007" / "metadata.json").unlink(),
        "torch_dcp or fsdp_dtensor, which is",
    ),
    "zarr": (
        "rotary",
        lambda d: (d / "iter_0000007" / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "sharded_backend = 'zarr' is not read",
    ),
    "more layers than weights": (
        "rotary",
        lambda d: change(d / "iter_0000007" / "common.pt", args_of(num_layers=5)),
        "has no tensor decoder.layers.4",
    ),
    "fewer layers than weights": (
        "rotary",
        lambda d: change(d / "iter_0000007" / "common.pt", args_of(num_layers=3)),
        "has a tensor decoder.layers.3",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_one_line_and_writes_nothing(case, tmp_path, capsys):
    name, damage, words = BAD[case]
    save = checkpoint(name, tmp_path)
    damage(save)
    assert run(save, tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("error: ") and re.search(words, message), message
    assert [one.name for one in tmp_path.iterdir()] == [name]


OPTIONS = {
    "no tokenizer": (
        ("--vocabulary", "64"),
        r"does not have its tokenizer \(HuggingFaceTokenizer, None\): pass --tokenizer",
    ),
    "another tokenizer": (
        ("--tokenizer", "byte"),
        "tokenizer byte has 257 tokens, padded 288, and .* has 96 rows: pass",
    ),
    "too few tokens": (("--tokenizer", TOKENIZER, "--vocabulary", 60), "has 64 tokens, but model gpt knows 60"),
    "too many tokens": (("--tokenizer", TOKENIZER, "--vocabulary", 97), "vocabulary = 97, but embedding.* has 96 rows"),
    "too long": (
        ("--tokenizer", TOKENIZER, "--sequence-length", 25),
        "sequence_length = 25, but the model's table has 24",
    ),
    "another iteration": (("--tokenizer", TOKENIZER, "--step", 8), "has no iter_0000008: it has iter_0000007"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_wrong_option_is_one_line_and_writes_nothing(case, tmp_path, capsys):
    options, words = OPTIONS[case]
    assert run(checkpoint("gpt", tmp_path), tmp_path / "run", *options) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("error: ") and re.search(words, message), message
    assert [one.name for one in tmp_path.iterdir()] == ["gpt"]


def test_a_tokenizer_in_the_checkpoint_is_used(tmp_path):
    save = checkpoint("gpt", tmp_path)
    (save / "iter_0000007" / "tokenizer").mkdir()
    shutil.copyfile(TOKENIZER, save / "iter_0000007" / "tokenizer" / "tokenizer.json")
    assert run(save, tmp_path / "run", "--sequence-length", 16) == 0
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").is_file()

"""Import, five steps of fine-tuning on a pipeline, export: transformers loads the directory, and chats as megajax.generate.

pip install "megajax[judges]" && pytest -m slow tests/differential/test_round_trips.py
"""

import contextlib
import io
import json
import pathlib

import pytest

from megajax.generate.__main__ import main
from tests.differential.random_models import write_tokenizer
from tests.interop.hugging_face import FAMILIES, convert, golden
from tests.test_finetune import train

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ 'w10' if m.role == 'user' else 'w11' }} {{ m.content }} w12 {% endfor %}"
    "{% if add_generation_prompt %}w11{% endif %}"
)
GENERATION = {"eos_token_id": [1, 60], "bos_token_id": 0, "repetition_penalty": 1.2, "do_sample": False}
NEW = 12
CHATS = [
    [{"role": "user", "content": "w20 w21"}],
    [
        {"role": "user", "content": "w30"},
        {"role": "assistant", "content": "w31 w32"},
        {"role": "user", "content": "w33 w20 w21"},
    ],
]


def source(family: str, folder: pathlib.Path) -> pathlib.Path:
    """The golden model in bf16 with a tokenizer, a template and settings of generation."""
    import torch
    from transformers import AutoModelForCausalLM

    directory = folder / family
    AutoModelForCausalLM.from_pretrained(golden(family), dtype=torch.bfloat16).save_pretrained(directory)
    write_byte_tokenizer(directory) if family.startswith("qwen") else write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    return directory


def write_byte_tokenizer(folder: pathlib.Path) -> None:
    """Bytes with merges, the only kind that transformers makes of a Qwen's."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds

    space = "\u0120"
    merges = [(space, "w"), *((digit, other) for digit in "2345" for other in "0123456")]
    names = ["<s>", "</s>", "<unk>", "w", space, *"0123456789", *("".join(pair) for pair in merges)]
    inner = Tokenizer(kinds.BPE({name: token for token, name in enumerate(names)}, merges))
    inner.add_special_tokens(["<s>", "</s>", "<unk>"])
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | {"tokenizer_class": "Qwen2Tokenizer"}))


def data(folder: pathlib.Path) -> pathlib.Path:
    path = folder / "chats.jsonl"
    with path.open("w") as file:
        for number in range(16):
            chat = [
                {"role": "user", "content": f"w{20 + number}"},
                {"role": "assistant", "content": f"w{30 + number} w50"},
            ]
            file.write(json.dumps({"messages": chat}) + "\n")
    return path


def generated(folder: pathlib.Path, *words) -> list[str]:
    rows, out = folder / "rows.jsonl", folder / "out.jsonl"
    rows.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    out.unlink(missing_ok=True)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        options = ["--prompts", rows, "--out", out, "--new-tokens", NEW, "--devices", "cpu:1", "--precision", "fp32"]
        assert main([str(word) for word in (*words, *options)]) == 0, told.getvalue()
    return [json.loads(line)["text"] for line in out.read_text().splitlines()]


def judged(directory: pathlib.Path) -> list[str]:
    """The answers of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer, answers = AutoTokenizer.from_pretrained(directory), []
    for chat in CHATS:
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            made = model.generate(**inputs, max_new_tokens=NEW)[0]
        answers.append(tokenizer.decode(made[inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("family", [name for name in FAMILIES])
def test_a_chat_with_a_tuned_model_is_that_of_transformers(family, tmp_path):
    pytest.importorskip("torch")
    from transformers import AutoConfig, GenerationConfig

    directory, run, tuned = source(family, tmp_path), tmp_path / "run", tmp_path / "tuned"
    assert convert("import", directory, "--run-dir", run) == 0
    words = ["--config", run / "config.toml", "--resume", run, "--run-dir", tuned, "--sft-data", data(tmp_path)]
    words += ["--steps", "5", "--global-batch-size", "4", "--learning-rate", "1e-3", "--precision", "fp32"]
    train([*words, "--devices", "cpu:2", "--pipe", "2"])
    assert convert("export", tuned, "--out", tmp_path / "kept") == 0
    assert convert("export", tuned, "--out", tmp_path / "exact", "--dtype", "fp32") == 0
    found = AutoConfig.from_pretrained(tmp_path / "kept")
    assert str(found.dtype) == "torch.bfloat16" and found.model_type == AutoConfig.from_pretrained(directory).model_type
    assert GenerationConfig.from_pretrained(tmp_path / "kept").repetition_penalty == 1.2
    assert generated(tmp_path, "--run-dir", tuned) == judged(tmp_path / "exact")
    assert generated(tmp_path, "--init-from", tmp_path / "kept") == judged(tmp_path / "kept")
    assert generated(tmp_path, "--init-from", directory) == judged(directory)


def test_a_tuned_bert_classifies_as_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForPreTraining, AutoModelForSequenceClassification, AutoTokenizer

    from experiments import finetune_bert
    from megajax.train.sinks import read_steps

    directory, tuned = tmp_path / "bert", tmp_path / "tuned"
    AutoModelForPreTraining.from_pretrained(golden("bert"), dtype=torch.bfloat16).save_pretrained(directory)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "##der", "king", "queen", "day", "##s"]
    (directory / "vocab.txt").write_text("\n".join(pieces))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 16}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [
        {"sentence": f"A {word} {noun}", "label": int(word == "good")}
        for word in ("good", "bad", "badder")
        for noun in ("king", "queen", "day", "a king", "a queen", "a day", "kings", "queens", "days", "night")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--init-from", directory, "--task", "sst2", "--task-data", tmp_path / "rows.jsonl"]
    words += ["--dev-data", tmp_path / "rows.jsonl", "--epochs", "1"]  # five steps of six rows
    words += [
        "--global-batch-size",
        "6",
        "--microbatch-size",
        "1",
        "--sequence-length",
        "16",
        "--learning-rate",
        "3e-3",
        "--precision",
        "fp32",
    ]
    words += ["--devices", "cpu:2", "--pipe", "2", "--run-dir", tuned]
    assert finetune_bert.main(list(map(str, words))) == 0
    assert convert("export", tuned, "--out", tmp_path / "kept") == 0
    assert convert("export", tuned, "--out", tmp_path / "exact", "--dtype", "fp32") == 0
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "kept", dtype="auto").dtype == torch.bfloat16
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exact", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exact")
    assert type(tokenizer).__name__ == type(AutoTokenizer.from_pretrained(directory)).__name__
    with torch.no_grad():
        found = model(**tokenizer([row["sentence"] for row in rows], padding=True, return_tensors="pt")).logits.argmax(
            -1
        )
    right = sum(int(one) == row["label"] for one, row in zip(found, rows, strict=True))
    [accuracy] = [row["dev/accuracy"] for row in read_steps(tuned / "log.jsonl") if "dev/accuracy" in row]
    assert accuracy == pytest.approx(right / len(rows))

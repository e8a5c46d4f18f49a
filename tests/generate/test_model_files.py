"""megajax.generate with the files of a model: its beginning of texts, its ends, settings, spaces and chats.

The tokenizer is of Metaspace's kind, as Llama's and Mistral's: token 40 is the word w40. The model's greedy tokens are
those of transformers (make_golden.py); what they mean as text is what transformers' tokenizer says.
"""

import io
import json
import pathlib
import shutil

import pytest

from megajax.generate.__main__ import main
from tests.generate.make_golden import FOLDER, GREEDY, NEW, PROMPTS
from tests.interop.hugging_face import FAMILIES, MIXED, golden

BOS, END = PROMPTS[0][0], 0
PROMPT = " ".join(f"w{token}" for token in PROMPTS[0][1:])
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}w40 {{ message.content }}"
    "{% else %} {{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} w2 w4{% endif %}"
)


def wanted(name: str, family: str = "llama") -> list[int]:
    """The new tokens of the first prompt."""
    return json.loads((FOLDER / "golden.json").read_text())[family][name][0]


@pytest.fixture
def directory(tmp_path) -> pathlib.Path:
    """The golden llama with such a tokenizer."""
    return make_directory("llama", tmp_path)


def make_directory(family: str, folder: pathlib.Path) -> pathlib.Path:
    """A golden model with such a tokenizer, which puts <s> in front of texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    found = pathlib.Path(shutil.copytree(golden(family), folder / family))
    names = [f"\u2581w{token}" for token in range(64)]
    names[END], names[1], names[BOS] = "</s>", "<unk>", "<s>"
    inner = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token="<unk>"))
    inner.add_special_tokens(["<s>", "</s>", "<unk>"])
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", BOS)])
    inner.save(str(found / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (found / "tokenizer_config.json").write_text(
        json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False})
    )
    return found


def generated(directory: pathlib.Path, tmp_path: pathlib.Path, *words, rows: list | None = None, settings=None) -> list:
    """The results of --out, with a generation_config.json of such settings."""
    if settings is not None:
        (directory / "generation_config.json").write_text(json.dumps(settings))
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = (*words, "--prompts", tmp_path / "rows.jsonl")
    out = tmp_path / "out.jsonl"
    assert main([str(word) for word in ("--init-from", directory, "--out", out, "--devices", "cpu:1", *words)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def words_of(tokens: list[int]) -> str:
    """What the tokens add to a text; the special ones are not shown."""
    return "".join(f" w{token}" for token in tokens if token not in (BOS, END, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "ends",
        *(pytest.param(name, marks=pytest.mark.slow) for name in GREEDY if name not in ("nothing", "ends", "all")),
        "all",
    ],
)
def test_the_texts_of_the_model_as_transformers_writes_them(name, directory, tmp_path, capsys):
    """<s> comes first, the space after the prompt stays, all ends end, and the settings of the file apply."""
    [row] = generated(
        directory, tmp_path, "--prompt", PROMPT, "--new-tokens", NEW, settings={"eos_token_id": END} | GREEDY[name]
    )
    tokens = wanted(name)
    assert row["text"] == words_of(tokens)
    if name == "ends":  # as in transformers a token that ends the text is shown unless it is special
        assert (row["finish"], len(tokens)) == ("end", row["tokens"]) and tokens[-1] in GREEDY[name]["eos_token_id"]
    told = capsys.readouterr().err
    assert f"from {directory / 'generation_config.json'}: " in told
    assert all(f"{key} " in told for key in GREEDY[name] if key not in ("renormalize_logits", "eos_token_id"))


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != MIXED])
def test_prompts_and_chats_are_continued_as_by_transformers_itself(family, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = make_directory(family, tmp_path)
    values = GREEDY["all"] | {"eos_token_id": [0, 30, 44, 52], "min_new_tokens": 5}
    chat = [{"role": "system", "content": "w32 w8"}, {"role": "user", "content": "w17 w19 w30"}]
    texts = [PROMPT, "w3", "w5 w5 w5 w61", "<s> w3 unknown"]
    rows = [*({"prompt": text} for text in texts), {"messages": chat}, {"messages": chat[1:]}]
    found = generated(directory, tmp_path, "--new-tokens", NEW, rows=rows, settings=values)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for row, result in zip(rows, found, strict=True):
        if "prompt" in row:
            given = tokenizer(row["prompt"], return_tensors="pt")
        else:
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            given = tokenizer.apply_chat_template(row["messages"], **options)
        ids, count = given["input_ids"], given["input_ids"].shape[1]
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=0)[0].tolist()
        decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
        wanted = decode(whole)[len(decode(whole[:count])) :] if "prompt" in row else decode(whole[count:])
        assert result["text"] == wanted, row


def test_options_and_none_come_before_the_file(directory, tmp_path, capsys):
    settings = {"repetition_penalty": 1.3, "num_beams": 2, "eos_token_id": [0, 63]}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    words = ["--init-from", str(directory), "--devices", "cpu:1", "--prompt", PROMPT, "--new-tokens", str(NEW)]
    assert main(words) == 2
    told = capsys.readouterr()
    assert "num_beams = 2 (beam search), which megajax does not have" in told.err and told.err.count("\n") == 1
    assert main([*words, "--generation-config", "none", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == PROMPT + words_of(wanted("nothing"))


@pytest.mark.slow
def test_chats(directory, tmp_path, capsys, monkeypatch):
    """Messages of a file, prompts that become turns, and a conversation, whose answers are turns too."""
    chat = [{"role": "system", "content": "w32"}, {"role": "user", "content": "w17 w19"}]
    rows = [{"messages": chat, "id": 3}, {"prompt": "w17 w19"}]
    common = ("--new-tokens", NEW, "--apply-chat-template", "--system-prompt", "w32")
    found = generated(directory, tmp_path, *common, rows=rows)
    answer = words_of(wanted("nothing")).strip()  # a message of its own begins without a space
    assert [row["text"] for row in found] == [answer] * 2
    assert found[0]["messages"] == chat and found[0]["id"] == 3 and found[1]["prompt"] == "w17 w19"

    second = [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": "w5"}]
    [expected] = generated(directory, tmp_path, *common, rows=[{"messages": second}])
    monkeypatch.setattr("sys.stdin", io.StringIO("w17 w19\nw5\n"))
    capsys.readouterr()
    words = ["--init-from", directory, "--devices", "cpu:1", "--interactive", *common]
    assert main([str(word) for word in words]) == 0
    assert capsys.readouterr().out.splitlines() == [answer, expected["text"]]


def test_wrong_chats_are_one_line(directory, tmp_path, capsys):
    user = {"role": "user", "content": "w3"}
    files = {
        '{"messages": []}': "messages = \\[\\] is not a list of messages",
        '{"messages": [{"role": "user"}]}': "message 1 has no content",
        json.dumps({"messages": [user], "prompt": "w3"}): 'has "prompt" and "messages": write one of the two',
        json.dumps({"messages": [user, {"role": "assistant", "content": "w4"}]}): "the last message is the assistant's",
        json.dumps({"messages": [user], "tools": "{"}): "tools is a text that is not JSON",
    }
    for number, (text, message) in enumerate(files.items()):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(text)
        error = refused(capsys, "--init-from", directory, "--prompts", path)
        assert error.startswith("error: ") and message.replace("\\", "") in error
    error = refused(capsys, "--init-from", directory, "--prompt", "w3", "--chat-template", "x")
    assert error == "error: --chat-template is of chats: pass --apply-chat-template, or omit it.\n"
    error = refused(capsys, "--init-from", golden("llama"), "--prompt", "w3", "--apply-chat-template")
    assert "has no chat template" in error


def refused(capsys, *words) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    return told.err

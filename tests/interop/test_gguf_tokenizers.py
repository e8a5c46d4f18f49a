"""Tokenizers rebuilt from GGUF metadata give the ids of the originals, whose metadata llama.cpp's converter would write.

The originals are those of transformers (Qwen2, GPT-2, Llama 2), or have the published tokenizer.json's parts (SmolLM2, Llama
3). transformers' own conversion is compared too: where it is other than the original, ours stays.
"""

import json
import pathlib
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megajax.interop.gguf.tokenizer import LLAMA3_WORDS, write_tokenizer

transformers = pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]
POOL = [
    "Hello",
    "world",
    "12345",
    "3.14",
    "\n",
    "\t",
    " ",
    "na\u00efve",
    "nai\u0308ve",
    "\u4e2d\u6587",
    "\U0001f600",
    "don't",
    "we'LL",
]
POOL += ["x=1;", "the", "pipeline", "schedule", "<|end|>", "<think>", "<s>", "\u00a0", "e\u0301", "1", "GPU", "\r\n"]
PREFIX = "tokenizer.ggml."


def texts() -> list[str]:
    """A thousand texts of words, spaces, digits, marks, other scripts and special tokens."""
    draw = random.Random(0)
    return [draw.choice(["", " ", "  "]).join(draw.choices(POOL, k=draw.randrange(12))) for _ in range(1000)]


def documents() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))[:4]]


def trained(pre, normalizer=None) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre
    if normalizer:
        inner.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        documents(), trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(inner.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def byte_level(regex: str | None = None):
    steps = [] if regex is None else [pre_tokenizers.Split(regex_of(regex), behavior="isolated")]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)])


def regex_of(pattern: str):
    from tokenizers import Regex

    return Regex(pattern)


def gpt2():
    return transformers.GPT2Tokenizer(*trained(byte_level())).backend_tokenizer


def qwen2():
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    return transformers.Qwen2Tokenizer(*trained(byte_level(PRETOKENIZE_REGEX), normalizers.NFC())).backend_tokenizer


def smollm():
    """https://huggingface.co/HuggingFaceTB/SmolLM2-135M, tokenizer.json"""
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner = Tokenizer(models.BPE(*trained(digits)))
    inner.pre_tokenizer, inner.decoder = digits, decoders.ByteLevel()
    return inner


def llama3():
    """https://huggingface.co/meta-llama/Meta-Llama-3-8B, tokenizer.json: words that are tokens are not merged."""
    vocabulary, merges = trained(byte_level(LLAMA3_WORDS))
    inner = Tokenizer(
        models.BPE(vocabulary, [pair for pair in merges if "".join(pair) != "\u0120the"], ignore_merges=True)
    )
    inner.pre_tokenizer, inner.decoder = byte_level(LLAMA3_WORDS), decoders.ByteLevel()
    return inner


# tokenizer.ggml.pre -> the original, and whether transformers 5.24 rebuilds it from the metadata too
BYTE_LEVEL = {"gpt-2": (gpt2, True), "smollm": (smollm, False), "qwen2": (qwen2, False), "llama-bpe": (llama3, False)}


def ids_of(inner) -> list[list[int]]:
    return [inner.encode(text).ids for text in texts()]


def rebuilt(metadata: dict, directory: pathlib.Path):
    """The directory's tokenizer, as AutoTokenizer reads it."""
    write_tokenizer(metadata, directory / "x.gguf", directory)
    return transformers.AutoTokenizer.from_pretrained(str(directory)).backend_tokenizer


@pytest.mark.parametrize("words", BYTE_LEVEL)
@pytest.mark.parametrize("begins", [None, True, False])
def test_a_byte_level_tokenizer_is_the_original(words, begins, tmp_path):
    make, is_theirs = BYTE_LEVEL[words]
    original = make()
    for token, special in (("<|end|>", True), ("<s>", True), ("<think>", False)):
        original.add_tokens([AddedToken(token, normalized=False, special=special)])
    vocabulary = original.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    kinds = [{"<|end|>": 3, "<s>": 3, "<think>": 4}.get(token, 1) for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    metadata = {"general.architecture": "llama"} | {PREFIX + "model": "gpt2", PREFIX + "pre": words}
    metadata |= {PREFIX + "tokens": tokens, PREFIX + "token_type": kinds, PREFIX + "merges": merges}
    metadata |= {PREFIX + "bos_token_id": vocabulary["<s>"], PREFIX + "eos_token_id": vocabulary["<|end|>"]}
    if begins is not None:
        metadata[PREFIX + "add_bos_token"] = begins
    if begins or (begins is None and words == "llama-bpe"):
        original.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    wanted = ids_of(original)
    found = rebuilt(metadata, tmp_path)
    assert ids_of(found) == wanted
    assert [found.decode(ids) for ids in wanted] == [original.decode(ids) for ids in wanted]
    if begins is False:
        parts = dict(tokenizer_type="gpt2", pre_tokenizer_type=words, tokens=tokens, token_type=kinds, merges=merges)
        assert (ids_of(theirs(parts)) == wanted) == is_theirs, (
            "transformers rebuilds it as the original now: use its conversion"
        )


def theirs(parts: dict):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    return convert_gguf_tokenizer("llama", parts)[0]


@pytest.mark.parametrize("flags", [{}, {"add_space_prefix": False}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_a_sentencepiece_tokenizer_is_the_original(flags, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    options = dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity", split_digits=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(documents()).splitlines()),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=700,
        remove_extra_whitespaces=False,
        user_defined_symbols=["<think>"],
        control_symbols=["<|end|>"],
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokens = [model.id_to_piece(number) for number in range(model.vocab_size())]
    tests = [
        (2, model.is_unknown),
        (3, model.is_control),
        (6, model.is_byte),
        (4, lambda one: tokens[one] == "<think>"),
    ]
    kinds = [next((kind for kind, test in tests if test(number)), 1) for number in range(len(tokens))]
    scores = [model.get_score(number) for number in range(len(tokens))]
    metadata = {"general.architecture": "llama", PREFIX + "model": "llama", PREFIX + "pre": "default"}
    metadata |= {PREFIX + "tokens": tokens, PREFIX + "scores": scores, PREFIX + "token_type": kinds}
    metadata |= {PREFIX + "bos_token_id": 1, PREFIX + "eos_token_id": 2, PREFIX + "unknown_token_id": 0}
    metadata |= {PREFIX + name: value for name, value in flags.items()}
    settings = {"add_bos_token": True, "add_eos_token": False} | flags
    settings["add_prefix_space"] = settings.pop("add_space_prefix", True)
    folder = tmp_path / "rebuilt"
    folder.mkdir()
    found = rebuilt(metadata, folder)
    original = transformers.LlamaTokenizer.from_pretrained(str(tmp_path), bos_token="<s>", eos_token="</s>", **settings)
    original.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    inner = original.backend_tokenizer
    assert ids_of(found) == ids_of(inner)
    assert [found.decode(ids) for ids in ids_of(inner)] == [inner.decode(ids) for ids in ids_of(inner)]

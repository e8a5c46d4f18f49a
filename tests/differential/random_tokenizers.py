"""Random little tokenizers of the library `tokenizers`, random settings of Hugging Face beside them, and random texts."""

import json
import pathlib
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog's name isn't Fox!",
    "In 1234 days, 56 dogs and 7,890 foxes: jump; (over) [the] {lazy} fences...",
    "def jump(over):\n    return over ** 2  # na\u00efve caf\u00e9\n\n",
    "\u4e2d\u6587 \u0416\u0438\u0437\u043d\u044c  \u3000 \U0001f600\U0001f680 e\u0301 \u00a0 \u2581x",
    "hello  world   hello\tworld\r\nhello",
]
WORDS = (
    *(
        "The",
        "fox",
        " fox",
        "dog's",
        "jumps",
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        "12",
        "3456",
        "n't",
        "caf\u00e9",
        "e\u0301",
    ),
    *(
        "\u4e2d\u6587",
        "\U0001f600",
        "\u3000",
        "\u2581",
        "\u00a0",
        ".",
        ",",
        " .",
        " n't",
        "##ox",
        "<",
        ">",
        "<s>",
        "</s>",
        "zebra",
    ),
)
SPECIAL = ("<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
BERT = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

texts = st.lists(
    st.one_of(st.sampled_from(WORDS), st.sampled_from(SPECIAL + BERT), st.text(max_size=3)), max_size=12
).map("".join)


@st.composite
def byte_level(draw) -> Tokenizer:
    """GPT-2's, Llama 3's and Qwen's kind."""
    inner, prefix = Tokenizer(models.BPE(ignore_merges=draw(st.booleans()))), draw(st.booleans())
    if draw(st.booleans()):
        split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    inner.normalizer = draw(st.sampled_from([None, normalizers.NFC()]))
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(
        inner,
        trainers.BpeTrainer(
            vocab_size=330, special_tokens=draw(_specials()), initial_alphabet=alphabet, show_progress=False
        ),
    )


@st.composite
def metaspace(draw) -> Tokenizer:
    """Llama 2's, Mistral's and T5's kind."""
    scheme = draw(st.sampled_from(["always", "first", "never"]))
    unigram = draw(st.booleans())
    inner = Tokenizer(
        models.Unigram() if unigram else models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=draw(st.booleans()))
    )
    if draw(st.booleans()):
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=draw(st.booleans()) or unigram)
        inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    else:  # as converted from sentencepiece before Metaspace had schemes
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        inner.decoder = decoders.Sequence(parts)
    names = ["<unk>", *(name for name in draw(_specials()) if name != "<unk>")]
    if unigram:
        return _trained(
            inner, trainers.UnigramTrainer(vocab_size=120, special_tokens=names, unk_token="<unk>", show_progress=False)
        )
    names += [f"<0x{byte:02X}>" for byte in range(256)] if inner.model.byte_fallback else []
    return _trained(inner, trainers.BpeTrainer(vocab_size=len(names) + 150, special_tokens=names, show_progress=False))


@st.composite
def word_piece(draw) -> Tokenizer:
    """BERT's kind."""
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=draw(st.booleans()), strip_accents=draw(st.sampled_from([None, True]))
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=draw(st.booleans()))
    return _trained(inner, trainers.WordPieceTrainer(vocab_size=150, special_tokens=list(BERT), show_progress=False))


def _specials():
    return st.lists(st.sampled_from(SPECIAL), min_size=1, unique=True)


def _trained(inner: Tokenizer, trainer: Any) -> Tokenizer:
    inner.train_from_iterator(CORPUS, trainer)
    return inner


@st.composite
def tokenizers(draw) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer with post-processor and added tokens, and its tokenizer_config.json."""
    inner = draw(st.one_of(byte_level(), metaspace(), word_piece()))
    for text in draw(st.lists(st.sampled_from(["<tool>", "fox dog", "<think>", "12"]), max_size=2, unique=True)):
        options = {name: draw(st.booleans()) for name in ("lstrip", "rstrip", "normalized", "special", "single_word")}
        inner.add_tokens([AddedToken(text, **options)])
    known = [name for name in SPECIAL + BERT if inner.token_to_id(name) is not None]
    inner.post_processor = draw(_post_processors(inner, known))
    settings: dict[str, Any] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = draw(st.sampled_from([None, None, *known, "<new>"]))
        if token is not None:
            plain = draw(st.booleans())
            settings[name] = (
                token if plain else {"__type": "AddedToken", "content": token, "lstrip": False, "rstrip": False}
            )
    kinds = [
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "GPT2Tokenizer",
        "Qwen2Tokenizer",
    ]
    options = {
        "tokenizer_class": st.sampled_from(kinds + ["BertTokenizer"]),
        "add_bos_token": st.booleans(),
        "add_eos_token": st.booleans(),
        "add_prefix_space": st.booleans(),
        "clean_up_tokenization_spaces": st.booleans(),
        "split_special_tokens": st.booleans(),
        "model_max_length": st.sampled_from([4, 1024]),
        "padding_side": st.sampled_from(["left", "right"]),
        "truncation_side": st.sampled_from(["left", "right"]),
        "legacy": st.booleans(),
    }
    for name in draw(st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True)):
        settings[name] = draw(options[name])
    if draw(st.booleans()):
        inner.enable_truncation(draw(st.integers(1, 4)))
    if draw(st.booleans()):
        inner.enable_padding(length=draw(st.sampled_from([None, 8])))
    return inner, settings


def _post_processors(inner: Tokenizer, known: list[str]):
    plain = [None, processors.ByteLevel(trim_offsets=True), processors.ByteLevel(trim_offsets=False)]
    begins = [_template(inner, f"{name} $A", name) for name in known[:2]]
    ends = [_template(inner, f"{known[0]} $A {name}", known[0], name) for name in known[1:3]]
    return st.sampled_from(plain + begins + ends)


def _template(inner: Tokenizer, single: str, *names: str) -> Any:
    tokens = [(name, inner.token_to_id(name)) for name in dict.fromkeys(names)]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=tokens)


def write(
    folder: pathlib.Path, inner: Tokenizer, settings: dict[str, Any], config: dict[str, Any] | None = None
) -> None:
    """Writes a directory of Hugging Face."""
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))

"""The published models by name. Their parameter counts are checked in tests/config/test_presets.py."""

from typing import Any

from megajax.config.bert import BertConfig
from megajax.config.errors import ConfigError
from megajax.config.model import ModelConfig
from megajax.config.preset_names import unknown_preset
from megajax.config.released import RELEASED
from megajax.config.released_others import RELEASED_OTHERS


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int, sequence_length: int, dropout: float = 0.0) -> dict:
    """A GPT: every field not named here is ModelConfig's default (layer norms, GELU, learned positions, biases)."""
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocabulary": vocabulary,
        "sequence_length": sequence_length,
        "dropout": dropout,
    }


# GPT-2's byte-pair vocabulary, and the same padded to a multiple of 1,024 as Megatron's papers print it.
GPT2_VOCABULARY = 50257
MEGATRON_VOCABULARY = 51200
BERT_VOCABULARY = 30522

MODELS: dict[str, dict[str, Any]] = {
    # The run without arguments: small enough to learn something on a laptop's CPU in minutes. One token per byte, and
    # one that ends a document; four layers, so that it can be cut into pipe * chunks = 2 or 4 pieces.
    "tiny": _gpt(4, 128, 4, 257, 128),
    # GPT-2: "Language Models are Unsupervised Multitask Learners" table 2, heads as released; dropout 0.1.
    "gpt2": _gpt(12, 768, 12, GPT2_VOCABULARY, 1024, 0.1),
    "gpt2-medium": _gpt(24, 1024, 16, GPT2_VOCABULARY, 1024, 0.1),
    "gpt2-large": _gpt(36, 1280, 20, GPT2_VOCABULARY, 1024, 0.1),
    "gpt2-xl": _gpt(48, 1600, 25, GPT2_VOCABULARY, 1024, 0.1),
    # Megatron-LM's first paper, 1909.08053 table 1 (its weak-scaling series); dropout 0.1. The 8.3B model it trained to
    # convergence has the same shape with 24 heads.
    "megatron-1.2b-2019": _gpt(40, 1536, 16, GPT2_VOCABULARY, 1024, 0.1),
    "megatron-2.5b-2019": _gpt(54, 1920, 20, GPT2_VOCABULARY, 1024, 0.1),
    "megatron-4.2b-2019": _gpt(64, 2304, 24, GPT2_VOCABULARY, 1024, 0.1),
    "megatron-8.3b-2019": _gpt(72, 3072, 32, GPT2_VOCABULARY, 1024, 0.1),
    # GPT-3, 2005.14165 table 2.1, at 2,048 tokens. Its vocabulary is GPT-2's 50,257; here it is Megatron's 51,200 for
    # all eight, so that gpt3-175b is the 174.6B model of 2104.04473. Two rows of the table do not multiply out:
    # 1.3B prints 24 heads of 128 for a hidden size of 2048 (here 16 heads of 128), and 13B prints a hidden size of
    # 5140 for 40 heads of 128 (here 5120).
    "gpt3-125m": _gpt(12, 768, 12, MEGATRON_VOCABULARY, 2048),
    "gpt3-350m": _gpt(24, 1024, 16, MEGATRON_VOCABULARY, 2048),
    "gpt3-760m": _gpt(24, 1536, 16, MEGATRON_VOCABULARY, 2048),
    "gpt3-1.3b": _gpt(24, 2048, 16, MEGATRON_VOCABULARY, 2048),
    "gpt3-2.7b": _gpt(32, 2560, 32, MEGATRON_VOCABULARY, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, MEGATRON_VOCABULARY, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, MEGATRON_VOCABULARY, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, MEGATRON_VOCABULARY, 2048),
    # 2104.04473 table 1, the weak-scaling series from 32 to 3,072 A100s.
    "megatron-1.7b": _gpt(24, 2304, 24, MEGATRON_VOCABULARY, 2048),
    "megatron-3.6b": _gpt(30, 3072, 32, MEGATRON_VOCABULARY, 2048),
    "megatron-7.5b": _gpt(36, 4096, 32, MEGATRON_VOCABULARY, 2048),
    "megatron-18.4b": _gpt(40, 6144, 48, MEGATRON_VOCABULARY, 2048),
    "megatron-39.1b": _gpt(48, 8192, 64, MEGATRON_VOCABULARY, 2048),
    "megatron-76.1b": _gpt(60, 10240, 80, MEGATRON_VOCABULARY, 2048),
    "megatron-145.6b": _gpt(80, 12288, 96, MEGATRON_VOCABULARY, 2048),
    "megatron-310.1b": _gpt(96, 16384, 128, MEGATRON_VOCABULARY, 2048),
    "megatron-529.6b": _gpt(105, 20480, 128, MEGATRON_VOCABULARY, 2048),
    "megatron-1008b": _gpt(128, 25600, 160, MEGATRON_VOCABULARY, 2048),
}
MODELS |= RELEASED | RELEASED_OTHERS
# "tiny" with experts, for experiments.moe: two of eight, which together are half as wide as the MLP of "tiny".
MODELS["moe-tiny"] = _gpt(4, 128, 4, 257, 128) | {"experts": 8, "feedforward": 128, "balance_loss": 0.01}

MODERNBERT = {"positions": "rotary", "rotary_base": 160000.0, "layer_pattern": "global,local*2", "token_types": 0}
MODERNBERT |= {"kind_fields": ("local.sliding_window=65", "local.rotary_base=10000.0"), "activation": "geglu_exact"}
MODERNBERT |= {"embedding_norm": True, "first_attention_norm": False, "biases": False, "masked_lm_bias": True}
MODERNBERT["output_heads"] = "masked_lm"
# BERT as Megatron-LM trained it, 1909.08053 table 4 and section 5.3: norms before attention and MLP, 512 tokens, dropout
# 0.1, and the released uncased vocabulary of WordPieces.
BERTS: dict[str, dict[str, Any]] = {
    "bert-tiny": _gpt(4, 128, 4, 2048, 128),
    "bert-336m": _gpt(24, 1024, 16, BERT_VOCABULARY, 512, 0.1),
    "bert-1.3b": _gpt(24, 2048, 32, BERT_VOCABULARY, 512, 0.1),
    "bert-3.9b": _gpt(48, 2560, 40, BERT_VOCABULARY, 512, 0.1),
    # ModernBERT, 2412.13663: in two of three layers tokens attend to 64 before and after; pretrained with 1,024 tokens.
    "modernbert-base": _gpt(22, 768, 12, 50368, 1024) | MODERNBERT | {"feedforward": 1152},
    "modernbert-large": _gpt(28, 1024, 16, 50368, 1024) | MODERNBERT | {"feedforward": 2624},
}

ALIASES = {"gpt3-530b": "megatron-529.6b", "gpt3-1t": "megatron-1008b"}

PRESETS: dict[str, ModelConfig] = {name: ModelConfig(name=name, **fields) for name, fields in MODELS.items()}
PRESETS |= {name: BertConfig(name=name, **fields) for name, fields in BERTS.items()}
PRESETS.update({alias: PRESETS[name] for alias, name in ALIASES.items()})


def preset(name: str) -> ModelConfig:
    """The published model called `name`.

    Raises:
        ConfigError: there is none; the message names the near matches.
    """
    if name not in PRESETS:
        raise ConfigError(unknown_preset(name, PRESETS))
    return PRESETS[name]

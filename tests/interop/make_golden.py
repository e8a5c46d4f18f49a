"""Writes the golden models of tests/interop: tiny random models of transformers, and their logits.

python tests/interop/make_golden.py [FAMILY ...]      in an environment with megajax[judges]; the files are from torch
                                                      2.15.0 and transformers 5.23.0

golden/FAMILY/ has config.json, model.safetensors (fp32, every parameter random) and tokenizer.json as transformers writes
them; logits.npy: fp32 [2, 16, 64], of the tokens that `tokens()` returns; and greedy.npy: int [2, 64], the most likely
continuation of the first PROMPT of them, each token by a pass over all before it.
"""

import pathlib
import sys

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"
LENGTH, VOCABULARY = 16, 64
PROMPT, NEW = 7, 64
COMMON = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    bos_token_id=0,
    eos_token_id=0,
)
SPARSE = COMMON | dict(intermediate_size=12, max_position_embeddings=128)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=100.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


def tokens() -> np.ndarray:
    """int [2, 16]."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))


def configs() -> dict:
    """A configuration of each family."""
    from transformers import (
        GPT2Config,
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
        OlmoeConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    sizes = dict(n_embd=16, n_layer=4, n_head=4, n_inner=48, n_positions=80, vocab_size=VOCABULARY)
    return {
        "gpt2": GPT2Config(**sizes, bos_token_id=0, eos_token_id=0),
        "llama": LlamaConfig(
            **COMMON, head_dim=8, max_position_embeddings=128, rope_parameters=LLAMA3, rms_norm_eps=1e-5
        ),
        "mistral": MistralConfig(**COMMON, max_position_embeddings=128, sliding_window=5),
        "qwen2": Qwen2Config(**COMMON, max_position_embeddings=128, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**COMMON | dict(num_attention_heads=2), head_dim=12, max_position_embeddings=128),
        "mixtral": MixtralConfig(**SPARSE, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_moe": Qwen3MoeConfig(
            **SPARSE | dict(num_attention_heads=2),
            head_dim=12,
            moe_intermediate_size=8,
            num_experts=6,
            num_experts_per_tok=3,
            norm_topk_prob=True,
        ),
        # sparse are layers 1, 5 and 7 of 8: every second one, but for layer 3
        "qwen3_moe_mixed": Qwen3MoeConfig(
            **SPARSE | dict(num_attention_heads=2, intermediate_size=20, num_hidden_layers=8),
            head_dim=12,
            moe_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
        ),
        # transformers gives the embedding of a padding token, by default 1, no gradient
        "olmoe": OlmoeConfig(**SPARSE, num_experts=5, num_experts_per_tok=3, pad_token_id=None),
    }


def random_model(config):
    """A model whose parameters are all random, also norms and biases."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 1.5 if "wpe" in name else 0.25  # GPT-2's greedy text would repeat one token
            parameter.copy_(1 + 0.2 * noise if "norm" in name or ".ln_" in name else scale * noise)
    return model


def write_tokenizer(directory: pathlib.Path) -> None:
    """A tokenizer of 63 words and an end of document."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|endoftext|>", "[UNK]", *(f"w{number}" for number in range(VOCABULARY - 2))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(directory / "tokenizer.json"), pretty=False)


def greedy(model):
    """The most likely continuations, [2, NEW], also after an end of document."""
    import torch

    text = torch.from_numpy(tokens())[:, :PROMPT]
    with torch.no_grad():
        for _ in range(NEW):
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return text[:, PROMPT:]


def main() -> None:
    """Writes all directories, or those that are named."""
    import torch

    for family, config in configs().items():
        if sys.argv[1:] and family not in sys.argv[1:]:
            continue
        directory = GOLDEN / family
        model = random_model(config)
        model.save_pretrained(directory)
        (directory / "generation_config.json").unlink(missing_ok=True)
        write_tokenizer(directory)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens())).logits
        np.save(directory / "logits.npy", logits.numpy())
        np.save(directory / "greedy.npy", greedy(model).numpy().astype(np.uint8))


if __name__ == "__main__":
    main()

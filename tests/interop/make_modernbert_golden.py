"""Writes golden/modernbert: a tiny random ModernBERT of transformers, and what it computes.

python -m tests.interop.make_modernbert_golden   in an environment with megajax[judges]; the files are from torch 2.13.0 and
                                                 transformers 5.24.0

config.json and model.safetensors (fp32, every parameter random) as transformers writes them, and outputs.npz: fp32 logits
[2, 16, 64] of `inputs()`.
"""

import pathlib

import numpy as np

DIRECTORY = pathlib.Path(__file__).parent / "golden" / "modernbert"
LENGTH, VOCABULARY, PADDING = 16, 64, np.array([0, 5], np.int32)
SIZES = dict(
    hidden_size=16,
    intermediate_size=12,
    num_hidden_layers=6,
    num_attention_heads=4,
    max_position_embeddings=40,
    vocab_size=VOCABULARY,
    local_attention=6,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    },
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
)


def inputs() -> dict[str, np.ndarray]:
    """Tokens int [2, 16]; the second sample ends with 5 tokens of padding. Token types are BERT's, and not read."""
    drawn = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH), dtype=np.int32)
    return {"tokens": drawn, "types": np.zeros_like(drawn), "padding": PADDING}


def random_modernbert(**settings):
    """A model whose parameters are all random, also norms and biases; every third layer attends to all tokens."""
    import torch
    import transformers

    config = transformers.ModernBertConfig(**SIZES | settings, attn_implementation="eager")
    model = transformers.ModernBertForMaskedLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.25 * noise)
    return model


def logits_of(model) -> np.ndarray:
    """What transformers computes of `inputs()`."""
    import torch

    attended = np.arange(LENGTH) < LENGTH - PADDING[:, None]
    tokens, mask = (torch.from_numpy(array.astype(np.int64)) for array in (inputs()["tokens"], attended))
    with torch.no_grad():
        return model(tokens, attention_mask=mask).logits.numpy()


def main() -> None:
    """Writes the directory."""
    model = random_modernbert()
    model.save_pretrained(DIRECTORY)
    (DIRECTORY / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(DIRECTORY / "outputs.npz", logits=logits_of(model))


if __name__ == "__main__":
    main()

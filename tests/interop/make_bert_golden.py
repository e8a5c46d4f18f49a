"""Writes the golden BERTs of tests/interop: tiny random models of transformers, and what they compute.

python tests/interop/make_bert_golden.py   in an environment with megajax[judges]; the files are from torch 2.15.0 and
                                           transformers 5.23.0

golden/FAMILY/ has config.json and model.safetensors (fp32, every parameter random) as transformers writes them, vocab.txt,
and outputs.npz: fp32 last_hidden_state [2, 16, 16], prediction_logits [2, 16, 64] and seq_relationship_logits [2, 2] of
`inputs()`.
"""

import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"
LENGTH, VOCABULARY, PADDING = 16, 64, np.array([0, 5], np.int32)
SIZES = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=40,
    vocab_size=VOCABULARY,
    type_vocab_size=3,
)
FAMILIES = {"bert": "Bert", "megatron-bert": "MegatronBert"}


def inputs() -> dict[str, np.ndarray]:
    """Tokens and their types int [2, 16]; the second sample ends with 5 tokens of padding."""
    draw = np.random.default_rng(0)
    tokens, types = (draw.integers(0, count, (2, LENGTH), dtype=np.int32) for count in (VOCABULARY, 3))
    return {"tokens": tokens, "types": types, "padding": PADDING}


def random_bert(prefix: str, architecture: str = "ForPreTraining", **settings):
    """A model whose parameters are all random, also norms and biases."""
    import torch
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**SIZES | settings, attn_implementation="eager")
    model = getattr(transformers, prefix + architecture)(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = name.endswith(("LayerNorm.weight", "ln.weight"))
            parameter.copy_(1 + 0.2 * noise if is_scale else 0.25 * noise)
    return model


def outputs(model) -> dict[str, np.ndarray]:
    """What transformers computes of `inputs()`."""
    import torch

    given = inputs()
    attended = np.arange(LENGTH) < LENGTH - PADDING[:, None]
    with torch.no_grad():
        out = model(
            torch.from_numpy(given["tokens"]).long(),
            attention_mask=torch.from_numpy(attended.astype(np.int64)),
            token_type_ids=torch.from_numpy(given["types"]).long(),
            output_hidden_states=True,
        )
    names = ("prediction_logits", "seq_relationship_logits")
    return {name: out[name].numpy() for name in names} | {"last_hidden_state": out.hidden_states[-1].numpy()}


def main() -> None:
    """Writes all directories."""
    for family, prefix in FAMILIES.items():
        directory, model = GOLDEN / family, random_bert(prefix)
        model.save_pretrained(directory)
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        pieces = [*special, *(f"w{number}" for number in range(VOCABULARY - len(special)))]
        (directory / "vocab.txt").write_text("\n".join(pieces) + "\n")
        np.savez_compressed(directory / "outputs.npz", **outputs(model))


if __name__ == "__main__":
    main()

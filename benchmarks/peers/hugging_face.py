"""Hugging Face's GPT-2 (transformers) with its defaults: eager, attention by scaled_dot_product_attention, without dropout.

Run by benchmarks/mfu.py with the Python of --peer-python.
"""

import sys

import loop
import torch
from torch import nn

try:
    import transformers
except ImportError as error:
    print(f"{error.name} is not installed", file=sys.stderr)
    sys.exit(3)


class Loss(nn.Module):
    """The model's own loss, which shifts the labels by one and so omits a token of each sample."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=labels, use_cache=False).loss


def build(shape: dict) -> nn.Module:
    """The model, with GPT-2's activation and no dropout."""
    config = transformers.GPT2Config(
        n_layer=shape["layers"],
        n_embd=shape["hidden"],
        n_head=shape["heads"],
        n_positions=shape["sequence_length"],
        vocab_size=shape["vocabulary"],
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    return Loss(transformers.GPT2LMHeadModel(config).train())


if __name__ == "__main__":
    loop.main(build, {"transformers": transformers.__version__})

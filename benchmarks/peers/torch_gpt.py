"""A GPT in plain PyTorch under torch.compile, attention by scaled_dot_product_attention: flash attention on a GPU.

Run by benchmarks/mfu.py with the Python of --peer-python.
"""

import loop
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Layer norm, attention, layer norm, MLP; two residuals, as in GPT-2 and megajax."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query_key_value, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, hidden = x.shape
        split = self.query_key_value(self.attention_norm(x)).view(samples, tokens, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(samples, tokens, hidden))
        return x + self.down(functional.gelu(self.up(self.feedforward_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Learned positions, tied embedding and head; gives the mean loss."""

    def __init__(self, shape: dict):
        super().__init__()
        hidden = shape["hidden"]
        self.tokens = nn.Embedding(shape["vocabulary"], hidden)
        self.positions = nn.Embedding(shape["sequence_length"], hidden)
        self.blocks = nn.ModuleList(Block(hidden, shape["heads"]) for _ in range(shape["layers"]))
        self.norm = nn.LayerNorm(hidden)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(shape: dict) -> nn.Module:
    """The compiled model."""
    return torch.compile(Gpt(shape))


if __name__ == "__main__":
    loop.main(build, {})

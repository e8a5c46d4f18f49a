"""Multi-token prediction in torch, written from 2412.19437 section 2.2, around a model and a decoder layer of transformers.

Module k gets the hidden states of tokens 1 to T - k and the embeddings of tokens 1 + k to T, which are cut out of the
sequences, and predicts tokens 2 + k to T + 1. What the first one gets is the model's normed output, and each has a norm
after its block, as in DeepSeek-V3's files.
"""

import copy
import pathlib

import numpy as np
import torch
from safetensors.torch import load_file, save_file

EXTRA = {
    "enorm.weight": "enorm",
    "hnorm.weight": "hnorm",
    "eh_proj.weight": "eh_proj",
    "shared_head.norm.weight": "norm",
}


class Reference(torch.nn.Module):
    """A causal model of transformers with modules, all random."""

    def __init__(self, main, modules: int, factor: float):
        super().__init__()
        self.main, self.factor, hidden = main, factor, main.config.hidden_size
        main.set_experts_implementation("eager")  # transformers' grouped matmul has no fp64
        layer, norm = type(main.model.layers[-1]), type(main.model.norm)
        self.config = copy.deepcopy(main.config)
        self.config.first_k_dense_replace = 0
        self.further = torch.nn.ModuleList()
        for _ in range(modules):
            parts = {name: norm(hidden, eps=main.config.rms_norm_eps) for name in ("enorm", "hnorm", "norm")}
            parts |= {"eh_proj": torch.nn.Linear(2 * hidden, hidden, bias=False), "block": layer(self.config, 0)}
            self.further.append(torch.nn.ModuleDict(parts))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in self.further.named_parameters():
                around = 1.0 if name.endswith("norm.weight") else 0.0
                parameter.copy_(around + 0.2 * torch.randn(parameter.shape, generator=generator))
            for name, buffer in self.further.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))

    def states(self, tokens):
        """The normed output of the model [b, s, h], and that of each module k [b, s - k, h]."""
        hidden = self.main.model(tokens).last_hidden_state
        found = [hidden]
        for number, module in enumerate(self.further, 1):
            count = tokens.shape[1] - number
            embedded = self.main.model.embed_tokens(tokens[:, number:])
            both = torch.cat([module["enorm"](embedded), module["hnorm"](hidden[:, :count])], dim=-1)
            x, places = module["eh_proj"](both), torch.arange(count)[None]
            mask = torch.full((count, count), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
            table = self.main.model.rotary_emb(x, position_ids=places)
            x = module["block"](x, attention_mask=mask, position_embeddings=table, position_ids=places)
            hidden = module["norm"](x[0] if isinstance(x, tuple) else x)
            found.append(hidden)
        return found

    def losses(self, tokens, labels, weights) -> list:
        """The means of the model's losses and of each module's."""
        found = []
        for number, hidden in enumerate(self.states(tokens)):
            logits, own = self.main.lm_head(hidden), weights[:, number:]
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, number:], reduction="none")
            found.append((losses * own).sum() / own.sum())
        return found

    def loss(self, losses):
        """What is trained."""
        return losses[0] + self.factor * sum(losses[1:]) / len(self.further)

    def in_fp64(self) -> "Reference":
        """A copy."""
        return copy.deepcopy(self).double()

    def write(self, directory: pathlib.Path) -> None:
        """The files that transformers writes, with the modules as layers after the last one."""
        self.main.config.num_mtp_layers = len(self.further)
        self.main.save_pretrained(directory)
        (directory / "generation_config.json").unlink(missing_ok=True)
        tensors = load_file(directory / "model.safetensors")
        layers = self.main.config.num_hidden_layers
        for number, module in enumerate(self.further):
            alone = copy.deepcopy(self.config)
            alone.num_hidden_layers = 1
            one = type(self.main)(alone)
            one.model.layers[0].load_state_dict(module["block"].state_dict())
            one.save_pretrained(directory / "block")  # in the names of files
            block = load_file(directory / "block" / "model.safetensors")
            for path in (directory / "block").iterdir():
                path.unlink()
            (directory / "block").rmdir()
            prefix, first = f"model.layers.{layers + number}.", "model.layers.0."
            tensors |= {prefix + name.removeprefix(first): t for name, t in block.items() if name.startswith(first)}
            tensors |= {prefix + theirs: module[ours].weight.detach().float() for theirs, ours in EXTRA.items()}
            tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file({name: t.float().contiguous() for name, t in tensors.items()}, directory / "model.safetensors")
        (directory / "model.safetensors").chmod(0o644)


def tensors_of(rows: dict[str, np.ndarray], dtype=torch.float64) -> tuple:
    """Tokens, labels and weights of a batch."""
    whole = (torch.from_numpy(rows[name].astype(np.int64)) for name in ("tokens", "labels"))
    return *whole, torch.from_numpy(rows["weights"]).to(dtype)

"""Writes the golden adapters of tests/interop: PEFT's files for the golden models, and the gradients that PEFT computes.

python tests/interop/make_lora_golden.py      in an environment with torch, transformers and peft; the files are from
                                              peft 0.21.2, torch 2.13.0 and transformers 5.24.0

golden/lora/FAMILY/ has adapter_config.json and adapter_model.safetensors, as PEFT writes them, of random A and B; and
gradients.npz: "loss", the mean over `tokens()` of the next token's cross entropy, and its gradients by the tensors' names.
"""

import os
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from tests.interop.make_golden import GOLDEN, tokens

RANK, ALPHA = 3, 6
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}


def main() -> None:
    """Writes all of them."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    os.chdir(GOLDEN)  # the name of the base model in the files is that of a directory beside them
    for family, targets in TARGETS.items():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32, attn_implementation="eager")
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(base, config).eval()
        own = {name: one for name, one in model.named_parameters() if "lora_" in name}
        assert all(one.requires_grad == (name in own) for name, one in model.named_parameters())
        with torch.no_grad():
            for one in own.values():
                one.copy_(0.3 * torch.randn_like(one))
        ids = torch.tensor(tokens())
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        out = GOLDEN / "lora" / family
        model.save_pretrained(out)
        (out / "README.md").unlink(missing_ok=True)
        gradients = {name.replace(".default", ""): one.grad.numpy() for name, one in own.items()}
        np.savez(out / "gradients.npz", loss=loss.item(), **gradients)


if __name__ == "__main__":
    main()

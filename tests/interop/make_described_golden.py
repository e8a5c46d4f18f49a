"""Writes the golden models of tests/interop/test_described_golden.py: tiny random models of transformers, and their logits.

python tests/interop/make_described_golden.py      in an environment with megajax[judges]; the files are from torch 2.13.0
                                                   and transformers 5.24.0

golden/described/FAMILY/ has config.json and model.safetensors (fp32, every parameter random) as transformers writes them,
and logits.npy, fp32 [2, 16, 64], of the tokens that `make_golden.tokens` returns. The families have all fields together.
"""

import numpy as np

from tests.interop.described import configs, random_model
from tests.interop.make_golden import GOLDEN, tokens

DESCRIBED = GOLDEN / "described"
QUICK = ("gemma2", "olmo3", "cohere2", "phi3", "granite", "qwen2_moe", "gpt_oss")
QUICK += ("deepseek_v2", "deepseek_v3", "mamba2", "qwen3_next", "llama4_text", "granitemoehybrid")
QUICK += ("nemotron_h", "nanochat")
LAYERS = 3


def main() -> None:
    """Writes all directories."""
    import torch

    for family in QUICK:
        config = configs(LAYERS)[family]
        model = random_model(config)
        model.save_pretrained(DESCRIBED / family)
        (DESCRIBED / family / "generation_config.json").unlink(missing_ok=True)
        with torch.no_grad():
            np.save(DESCRIBED / family / "logits.npy", model(torch.from_numpy(tokens())).logits.numpy())


if __name__ == "__main__":
    main()

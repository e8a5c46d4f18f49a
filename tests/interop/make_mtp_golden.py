"""Writes golden/mtp: a tiny random DeepSeek-V3 with two modules of multi-token prediction, and torch's losses of a batch.

python tests/interop/make_mtp_golden.py      in an environment with megajax[judges]; the files are from torch 2.13.0 and
                                             transformers 5.24.0

config.json and model.safetensors (fp32) as transformers and DeepSeek write them; losses.npy, fp64: the model's mean loss and
those of the modules; output.npy, fp32 [2, 16, 16]: the last block's, before the norm.
"""

import numpy as np

from tests.interop.make_golden import GOLDEN, LENGTH, VOCABULARY

MTP, MODULES, FACTOR = GOLDEN / "mtp", 2, 0.3


def batch(samples: int = 2) -> dict[str, np.ndarray]:
    """[samples, LENGTH], a third of whose tokens have no weight."""
    random = np.random.default_rng(5)
    drawn = random.integers(1, VOCABULARY, (samples, LENGTH + 1), dtype=np.int32)
    weights = (random.random((samples, LENGTH)) > 0.3).astype(np.float32)
    sample = np.arange(samples, dtype=np.uint32)
    return {"tokens": drawn[:, :-1], "labels": drawn[:, 1:], "weights": weights, "sample": sample}


def main() -> None:
    """Writes the directory."""
    import torch

    from tests.interop.described import configs, random_model
    from tests.interop.mtp_reference import Reference, tensors_of

    reference = Reference(random_model(configs(3)["deepseek_v3"]), MODULES, FACTOR).eval()
    MTP.mkdir(exist_ok=True)
    reference.write(MTP)
    outputs, wide = [], reference.in_fp64()
    wide.main.model.norm.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    with torch.no_grad():
        np.save(MTP / "losses.npy", np.array([loss.item() for loss in wide.losses(*tensors_of(batch()))]))
    np.save(MTP / "output.npy", outputs[0].float().numpy())


if __name__ == "__main__":
    main()

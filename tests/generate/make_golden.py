"""Writes tests/generate/golden.json and golden.npz: what transformers generates by settings of generation_config.json.

python tests/generate/make_golden.py       in an environment with megajax[judges]; the files are from torch 2.13.0 and
                                           transformers 5.24.0

golden.json has for each of FAMILIES, of GREEDY and of PROMPTS the new tokens of `generate` for the golden models of
tests/interop. golden.npz has for each of SAMPLED bool [ROWS, VOCABULARY]: the tokens that transformers' logits processors
leave, for the scores of `scores()`.
"""

import json
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent
MODELS = FOLDER.parent / "interop" / "golden"
FAMILIES = ("gpt2", "llama", "qwen3", "mixtral")
NEW = 24
ROWS, VOCABULARY = 16, 40
PROMPTS = ([54, 40, 32, 17, 19, 2, 4], [11, 60, 11], [33])
ENDS = [5, 9]

GREEDY = {
    "nothing": {},
    "ends": {"eos_token_id": [60, 57, 2, 38]},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "a penalty below 1": {"repetition_penalty": 0.7},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3, "repetition_penalty": 0.6},
    "min_new_tokens": {"eos_token_id": list(range(0, 64, 3)), "min_new_tokens": 6},
    "min_length": {"eos_token_id": list(range(0, 64, 3)), "min_length": 9},
    "suppress": {"suppress_tokens": list(range(0, 64, 2)), "begin_suppress_tokens": list(range(1, 40, 2))},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 63, "begin_suppress_tokens": list(range(32))},
    "bad words": {
        "bad_words_ids": [*([token] for token in range(20)), [54, 40], [33, 21], *([a, a] for a in range(64))]
    },
    "bias": {"sequence_bias": [[[3], 2.5], [[4], -3.0], [[33, 5], 9.0], [[19, 2, 4, 6], 20.0], [[6, 6], -5.0]]},
    "decay": {"eos_token_id": [5, 9], "exponential_decay_length_penalty": [4, 1.4]},
    "all": {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[54, 40], [8]],
        "min_new_tokens": 12,
        "suppress_tokens": [1, 2, 3],
        "sequence_bias": [[[33], 0.5]],
        "remove_invalid_values": True,
        "renormalize_logits": True,
        "eos_token_id": list(range(0, 64, 5)),
    },
}
SAMPLED = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k by default": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_k": 0, "top_p": 0.6},
    "top_p 0": {"top_p": 0.0},
    "min_p": {"top_k": 0, "min_p": 0.2, "temperature": 0.5},
    "all": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.95},
    "top_h": {"top_k": 0, "top_h": 0.4},
    "typical_p": {"top_k": 0, "typical_p": 0.5},
    "epsilon_cutoff": {"top_k": 0, "epsilon_cutoff": 0.03},
    "eta_cutoff": {"top_k": 0, "eta_cutoff": 0.1},
}


def scores() -> np.ndarray:
    """fp32 [ROWS, VOCABULARY]."""
    return (np.random.default_rng(0).normal(size=(ROWS, VOCABULARY)) * 2).astype(np.float32)


def greedy(family: str, settings: dict) -> list[list[int]]:
    """The new tokens of each prompt, the end included."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(MODELS / family)
    model.generation_config = GenerationConfig.from_dict(dict(settings))
    found = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, pad_token_id=0, use_cache=False)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def kept(settings: dict) -> np.ndarray:
    """The tokens that may be drawn."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(MODELS / "gpt2")
    model.generation_config = GenerationConfig.from_dict({**settings, "do_sample": True})
    config = model._prepare_generation_config(None)[0]
    processors = model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    return torch.isfinite(processors(torch.zeros((ROWS, 1), dtype=torch.long), torch.from_numpy(scores()))).numpy()


def main() -> None:
    """Writes both files."""
    found = {family: {name: greedy(family, settings) for name, settings in GREEDY.items()} for family in FAMILIES}
    lines = ",\n".join(
        f' "{family}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in cases.items())
        + "}"
        for family, cases in found.items()
    )
    (FOLDER / "golden.json").write_text("{\n" + lines + "\n}\n")
    np.savez_compressed(FOLDER / "golden.npz", **{name: kept(settings) for name, settings in SAMPLED.items()})


if __name__ == "__main__":
    main()

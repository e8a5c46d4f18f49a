"""Writes dpo.json: losses and metrics of TRL's trainers on the golden Llama, for `test_dpo`. Not run by tests.

python -m venv trl && trl/bin/pip install trl==1.16.0 torch transformers && trl/bin/python -m tests.preference.make_golden
"""

import json
import pathlib
import random
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
LLAMA = HERE.parents[0] / "interop/golden/llama"
STEPS, PAIRS, LONGEST = 5, 8, 32
RATE, BETA = 2e-3, 0.3
NAMES = ("loss", "grad_norm", "kl", "rewards/", "logps/")


def pairs() -> list[dict[str, str]]:
    """Texts of words of the golden vocabulary; the last completions are longer than LONGEST."""
    draw = random.Random(0)
    words = lambda low, high: " ".join(f"w{draw.randrange(60)}" for _ in range(draw.randint(low, high)))  # noqa: E731
    made = [{"prompt": words(3, 9), "chosen": " " + words(2, 12), "rejected": " " + words(2, 12)} for _ in range(PAIRS)]
    made[-1]["rejected"] = " " + words(LONGEST, LONGEST)
    return made


TEMPLATE = "{% for m in messages %}w0 {{ 'w1' if m.role == 'user' else 'w2' }} {{ m.content }} w3 {% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}w0 w2 {% endif %}"


def formats() -> dict[str, list[dict]]:
    """Rows of each format; the second chat's completions begin alike, the third text's answer continues a word."""
    user, said = ({"role": "user", "content": "w5 w6"}, lambda text: {"role": "assistant", "content": text})
    chat = {"prompt": [user], "chosen": [said("w7 w8")], "rejected": [said("w9")]}
    more = {"prompt": [user, said("w1"), user], "chosen": [said("w7 w8")], "rejected": [said("w7 w9 w10")]}
    return {
        "text": [*pairs()[:2], {"prompt": "w4 w5", "chosen": "1 w6", "rejected": " w7"}],
        "implicit": [{"chosen": "w1 w2 w3 w4", "rejected": "w1 w2 w5"}, {"chosen": "w1 w2", "rejected": "w1 w2 w5"}],
        "chat": [chat, more],
        "implicit chat": [{side: [user, said(text)] for side, text in (("chosen", "w7 w8"), ("rejected", "w9"))}],
    }


def tokens(rows: list[dict]) -> list[list[list[int]]]:
    """TRL's ids of prompt, chosen and rejected of each row."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(LLAMA / "tokenizer.json"), eos_token=end, pad_token=end)
    tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as folder:
        settings = DPOConfig(output_dir=folder, report_to=[], bf16=False, use_cpu=True, max_length=None)
        model = AutoModelForCausalLM.from_pretrained(LLAMA)
        of = {"model": model, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
        made = DPOTrainer(args=settings, **of).train_dataset
        return [[row[f"{name}_ids"] for name in ("prompt", "chosen", "rejected")] for row in made]


def trained(loss_type: str) -> list[dict[str, float]]:
    """The records of each step of TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(LLAMA / "tokenizer.json"), eos_token=end, pad_token=end)
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    kto = loss_type == "kto"
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=PAIRS * (1 + kto),
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            logging_steps=1,
            report_to=[],
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            max_length=LONGEST,
            precompute_ref_log_probs=True,
            beta=BETA,
            gradient_checkpointing=False,
        )
        of = {"args": (KTOConfig if kto else DPOConfig)(**settings, loss_type=loss_type)}
        of |= {"model": model, "train_dataset": Dataset.from_list(pairs()), "processing_class": tokenizer}
        if not kto:
            trainer = DPOTrainer(**of)
        else:
            trainer = with_our_mismatches(KTOTrainer, of)
        trainer.train()
        history = trainer.state.log_history[:STEPS]
    return [{name: value for name, value in one.items() if name.startswith(NAMES)} for one in history]


def with_our_mismatches(trainer_class: type, of: dict):
    """A KTOTrainer whose mismatched completion is that of the same kind of the pair before, as in our batches."""

    class Trainer(trainer_class):
        def _prepare_dataset(self, *arguments):
            made = super()._prepare_dataset(*arguments)
            completions = made["completion_ids"]  # all chosen ones, then all rejected ones
            assert made["label"] == [True] * PAIRS + [False] * PAIRS
            other = [completions[row - 1 if row % PAIRS else row + PAIRS - 1] for row in range(2 * PAIRS)]
            return made.remove_columns("KL_completion_ids").add_column("KL_completion_ids", other)

    return Trainer(**of)


def main() -> None:
    """Writes the file."""
    found = {"settings": {"learning_rate": RATE, "beta": BETA, "sequence_length": LONGEST}, "pairs": pairs()}
    found |= {"steps": {loss_type: trained(loss_type) for loss_type in ("sigmoid", "ipo", "kto")}}
    found |= {"template": TEMPLATE, "tokens": {name: [rows, tokens(rows)] for name, rows in formats().items()}}
    text = json.dumps(found, indent=1)
    (pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "dpo.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

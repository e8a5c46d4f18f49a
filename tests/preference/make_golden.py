"""Writes dpo.json and grpo.json: TRL's losses and metrics on the golden Llama. Only slow tests run it.

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


GROUP, PROMPTS, NEW = 4, 2, 12
POLICY = {"beta": 0.1, "epsilon": 0.1, "epsilon_high": 0.15, "temperature": 0.9, "num_iterations": 4}


def rollouts() -> dict[str, list]:
    """Ids of prompts and completions, and their rewards; some completions have no end."""
    draw = random.Random(1)
    ids = lambda low, high: [draw.randrange(2, 62) for _ in range(draw.randint(low, high))]  # noqa: E731
    prompts = [prompt for _ in range(PROMPTS) for prompt in [ids(2, 7)] * GROUP]
    completions = [(ids(1, NEW) + [0])[:NEW] for _ in prompts]
    rewards = [round(draw.random(), 3) for _ in prompts]
    return {"prompts": prompts, "completions": completions, "rewards": rewards}


def policy_steps(loss_type: str, scale: str, correct: bool) -> list[dict[str, float]]:
    """The losses of steps on given completions by GRPOTrainer's `_compute_loss`, with AdamW of torch."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(LLAMA / "tokenizer.json"), eos_token=end, pad_token=end)
    given = rollouts()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            report_to=[],
            bf16=False,
            use_cpu=True,
            per_device_train_batch_size=GROUP * PROMPTS,
            num_generations=GROUP,
            max_completion_length=NEW,
            loss_type=loss_type,
            scale_rewards=scale,
            use_bias_correction_kl=correct,
            gradient_checkpointing=False,
            **POLICY,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": "w1"}] * PROMPTS),
            processing_class=tokenizer,
        )
    model, device = trainer.model, trainer.accelerator.device
    trainer.current_gradient_accumulation_steps = 1
    settings.steps_per_generation = 1
    longest = max(map(len, given["prompts"]))
    pad = lambda rows, width, left: torch.tensor(  # noqa: E731
        [[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in rows], device=device
    )
    ones = lambda rows: [[1] * len(row) for row in rows]  # noqa: E731
    prompts, completions = given["prompts"], given["completions"]
    rewards = torch.tensor(given["rewards"])
    groups = rewards.view(-1, GROUP)
    deviation = {"group": groups.std(1, keepdim=True), "batch": rewards.std(), "none": None}[scale]
    advantages = groups - groups.mean(1, keepdim=True)
    advantages = advantages if deviation is None else advantages / (deviation + 1e-4)
    inputs = {
        "prompt_ids": pad(prompts, longest, True),
        "prompt_mask": pad(ones(prompts), longest, True),
        "completion_ids": pad(completions, NEW, False),
        "completion_mask": pad(ones(completions), NEW, False),
        "advantages": advantages.reshape(-1).to(device),
        "num_items_in_batch": torch.tensor(sum(map(len, completions)), device=device),
    }
    whole = [torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")]
    with torch.no_grad():
        logps = trainer._get_per_token_logps_and_entropies(model, *whole, NEW)[0]
    inputs |= {"old_per_token_logps": logps, "ref_per_token_logps": logps}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    model.train()
    found = []
    for _ in range(POLICY["num_iterations"]):
        loss = trainer._compute_loss(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
        kept = ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
        found.append({"loss": loss.item(), "grad_norm": norm.item()} | {name: metrics[name] for name in kept})
    return found


def main() -> None:
    """Writes the files into this folder, or another one."""
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    found = {"settings": {"learning_rate": RATE, "beta": BETA, "sequence_length": LONGEST}, "pairs": pairs()}
    found |= {"steps": {loss_type: trained(loss_type) for loss_type in ("sigmoid", "ipo", "kto")}}
    found |= {"template": TEMPLATE, "tokens": {name: [rows, tokens(rows)] for name, rows in formats().items()}}
    (folder / "dpo.json").write_text(json.dumps(found, indent=1) + "\n")
    steps = {}
    for loss_type, scale, correct in (("dapo", "group", True), ("grpo", "batch", False), ("dr_grpo", "none", True)):
        options = {"scale_rewards": scale, "use_bias_correction_kl": correct}
        steps[loss_type] = {**options, "steps": policy_steps(loss_type, scale, correct)}
    sizes = {"group": GROUP, "new": NEW, "learning_rate": RATE, "sequence_length": LONGEST}
    text = json.dumps({"sizes": sizes, "policy": POLICY, "rollouts": rollouts(), "losses": steps}, indent=1)
    (folder / "grpo.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

"""The commands of `megajax COMMAND`: for each the module that it runs, which `python -m MODULE` runs as well.

This is plain data: it imports nothing, so that the list is printed at once.
"""

from typing import NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
      module: what `python -m` runs.
      summary: what it does, in a line.
      words: the first words of its command line, before those of the user.
    """

    module: str
    summary: str
    words: tuple[str, ...] = ()


# By group, as the list prints them.
GROUPS: dict[str, dict[str, Command]] = {
    "train": {
        "train": Command(
            "experiments.gpt3", "train a language model: GPT, Llama, Mistral, Qwen and mixtures of experts"
        ),
        "finetune": Command("experiments.finetune", "fine-tune on chats, or on prompts and completions"),
        "dpo": Command("experiments.dpo", "train on preferences, pairs of answers: DPO, IPO and KTO"),
        "grpo": Command("experiments.grpo", "train on rewards of the model's own completions: GRPO"),
        "bert": Command("experiments.bert", "train BERT on masked words and sentence order"),
        "finetune-bert": Command("experiments.finetune_bert", "fine-tune a BERT on GLUE's tasks, SQuAD or RACE"),
        "gpt2": Command("experiments.gpt2", "train with the recipe of the first Megatron-LM paper's GPT-2 runs"),
        "moe": Command("experiments.moe", "train a small mixture of experts on the bundled text"),
        "own-model": Command("experiments.own_model", "train the example of a model of one's own"),
        "launch": Command("megajax.launch", "supervise a host's training processes, and resume when one is lost"),
    },
    "data, checkpoints and weights": {
        "preprocess": Command(
            "megajax.data.preprocess", "tokenize text into .bin and .idx; merge, inspect and verify them"
        ),
        "inspect": Command(
            "megajax.checkpoint.inspect", "show what a checkpoint contains, and verify it; show a training's data"
        ),
        "import": Command(
            "megajax.interop.hugging_face",
            "weights of a Hugging Face model or a GGUF file to a run directory",
            ("import",),
        ),
        "import-megatron": Command(
            "megajax.interop.megatron", "weights of a Megatron-LM checkpoint to a run directory", ("import",)
        ),
        "export": Command(
            "megajax.interop.hugging_face", "a run's weights to a directory for transformers", ("export",)
        ),
    },
    "use a trained model": {
        "generate": Command("megajax.generate", "continue prompts, on any mesh"),
        "evaluate": Command("megajax.evaluate", "perplexity, LAMBADA, and the tasks of lm-evaluation-harness"),
        "evaluate-squad": Command(
            "megajax.evaluate.squad", "exact match and F1 of predicted answers to SQuAD's questions"
        ),
    },
    "plan a run": {
        "plan": Command("megajax.plan", "find the fastest layout of a model on a cluster, and explain it"),
        "dryrun": Command("megajax.plan.dryrun", "compile the training step for GPUs that are not there: does it fit?"),
        "calibrate": Command("megajax.plan", "measure the GPUs there are, for the planner", ("--calibrate",)),
        "failures": Command("experiments.failures", "what failures cost a long run: goodput, saves, spare hosts"),
        "sites": Command("experiments.slow_links", "which schedule survives slow links between sites"),
        "draw": Command("megajax.schedules.draw", "draw, print, compare or save pipeline schedules"),
    },
    "check and measure": {
        "verify": Command("megajax.verify", "run two layouts or versions, and name the first tensor that differs"),
        "validate": Command("benchmarks.published", "the time model's predictions against published throughputs"),
        "papers": Command("experiments.papers", "the tables and figures of Megatron-LM's papers, predicted"),
        "bench": Command("", "measure: `megajax bench` lists the benchmarks"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

BENCHMARKS = {  # of `megajax bench NAME`
    "mfu": Command("benchmarks.mfu", "tokens/s, TFLOP/s and MFU of the training step, over layouts"),
    "attention": Command("benchmarks.attention", "times of the attention kernels on the first device"),
    "checkpoints": Command("benchmarks.checkpoints", "seconds that a checkpoint takes, and for which training waits"),
    "communication": Command("benchmarks.communication", "bytes that a compiled step sends, against the formulas"),
    "data": Command("benchmarks.data", "throughput of preprocessing, the sample index, loading and streams"),
    "generation": Command("benchmarks.generation", "tokens per second of generation on several meshes"),
    "gpu-day": Command(
        "benchmarks.gpu_day", "correctness and speed on the GPUs of this machine, with a page of results"
    ),
    "gpu-settings": Command("benchmarks.gpu_settings", "step time under other settings of XLA, NCCL and CUDA"),
    "loss-curve": Command("benchmarks.loss_curve", "draw the loss of runs over their steps"),
    "memory-model": Command("benchmarks.compiled", "the memory model against XLA's buffer assignment", ("memory",)),
    "rankings": Command("benchmarks.rankings", "the planner's three best layouts of twelve questions, compiled"),
    "replication": Command("benchmarks.replication", "the cost of --replicate-state"),
    "roofline": Command("benchmarks.compiled", "estimated time of the compiled step by class of kernel", ("account",)),
    "schedules": Command("benchmarks.schedules", "bubbles of the pipeline schedules, simulated and measured"),
    "standing-questions": Command(
        "benchmarks.compiled", "the planner's answers, compiled and compared", ("questions",)
    ),
    "time-model": Command("benchmarks.compiled", "the time model against the roofline of compiled programs", ("time",)),
}

# Names that people try for a command; the error names the command.
SYNONYMS = {
    "pretrain": "train",
    "pretrain-gpt": "train",
    "run": "train",
    "fit": "train",
    "gpt3": "train",
    "gpt": "train",
    "llama": "train",
    "resume": "train",
    "pretrain-bert": "bert",
    "sft": "finetune",
    "fine-tune": "finetune",
    "preferences": "dpo",
    "ipo": "dpo",
    "kto": "dpo",
    "rlhf": "grpo",
    "rl": "grpo",
    "glue": "finetune-bert",
    "race": "finetune-bert",
    "torchrun": "launch",
    "elastic": "launch",
    "tokenize": "preprocess",
    "preprocess-data": "preprocess",
    "prepare": "preprocess",
    "merge": "preprocess",
    "checkpoint": "inspect",
    "ckpt": "inspect",
    "convert": "import",
    "load": "import",
    "gguf": "import",
    "hugging-face": "import",
    "megatron": "import-megatron",
    "save": "export",
    "sample": "generate",
    "inference": "generate",
    "chat": "generate",
    "serve": "generate",
    "text": "generate",
    "eval": "evaluate",
    "score": "evaluate",
    "test": "evaluate",
    "lm-eval": "evaluate",
    "squad": "evaluate-squad",
    "search": "plan",
    "tune": "plan",
    "estimate": "plan",
    "compile": "dryrun",
    "memory": "dryrun",
    "profile": "bench",
    "benchmark": "bench",
    "benchmarks": "bench",
    "mfu": "bench",
    "goodput": "failures",
    "schedule": "draw",
    "schedules": "draw",
    "plot": "draw",
    "compare": "verify",
    "diff": "verify",
    "check": "verify",
}

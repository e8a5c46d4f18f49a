"""Unknown options: the error names the option here, for the names that users of other tools type."""

import importlib

import pytest

from megajax.config.command_options import COMMAND_OPTIONS, TRAINING
from megajax.config.foreign import COMMON, OF_COMMANDS, TOOLS
from megajax.config.unknown_options import OPTION, describe_unknown, options_of
from megajax.schedules import draw
from tests.config.make_coming_from import PAGE, tables
from tests.parsers import ALL
from tests.parsers import options_of as parsers_options

# Checked by hand against the other tools' sources: what is typed, and the option that the error must name.
TYPED = {
    # nanoGPT
    "--batch_size=12": "--microbatch-size",
    "--block_size=1024": "--sequence-length",
    "--n_layer=12": "--layers",
    "--n_head=12": "--heads",
    "--n_embd=768": "--hidden",
    "--max_iters=600000": "--steps",
    "--lr_decay_iters=600000": "--decay-samples",
    "--min_lr=6e-5": "--minimum-learning-rate",
    "--warmup_iters=2000": "--warmup-steps",
    "--gradient_accumulation_steps=40": "--global-batch-size",
    "--grad_clip=1.0": "--clip-norm",
    "--dtype=bfloat16": "--precision",
    "--out_dir=out": "--run-dir",
    "--eval_interval=2000": "--validation-every",
    "--eval_iters=200": "--validation-batches",
    "--log_interval=1": "--log-every",
    "--dataset=openwebtext": "--text",
    "--device=cpu": "--devices",
    "--wandb_log=True": "--track wandb",
    # Megatron-LM
    "--tensor-model-parallel-size 8": "--tensor",
    "--pipeline-model-parallel-size 8": "--pipe",
    "--num-layers-per-virtual-pipeline-stage 2": "--chunks",
    "--context-parallel-size 2": "--context",
    "--expert-model-parallel-size 4": "--expert",
    "--micro-batch-size 4": "--microbatch-size",
    "--num-layers 12": "--layers",
    "--hidden-size 768": "--hidden",
    "--ffn-hidden-size 3072": "--feedforward",
    "--num-attention-heads 12": "--heads",
    "--num-query-groups 4": "--kv-heads",
    "--seq-length 1024": "--sequence-length",
    "--max-position-embeddings 1024": "--sequence-length",
    "--train-iters 1000": "--steps",
    "--lr 3e-4": "--learning-rate",
    "--min-lr 3e-5": "--minimum-learning-rate",
    "--lr-warmup-fraction .01": "--warmup-steps",
    "--lr-decay-style cosine": "--learning-rate-decay",
    "--clip-grad 1.0": "--clip-norm",
    "--bf16": "--precision bf16",
    "--use-distributed-optimizer": "--zero 1",
    "--recompute-granularity full": "--recompute",
    "--recompute-activations": "--recompute selective",
    "--swiglu": "--activation swiglu",
    "--use-flash-attn": "--attention",
    "--vocab-file vocab.json": "--tokenizer",
    "--save out": "--run-dir",
    "--load out": "--resume",
    "--save-interval 100": "--save-every",
    "--num-experts 8": "--experts",
    "--moe-router-topk 2": "--experts-per-token",
    "--rampup-batch-size 32 32 1000": "--batch-ramp",
    "--position-embedding-type rope": "--positions",
    "--untie-embeddings-and-output-weights": "--no-tied-embeddings",
    # Hugging Face
    "--per_device_train_batch_size 4": "--microbatch-size",
    "--num_train_epochs 3": "--steps",
    "--max_steps 1000": "--steps",
    "--lr_scheduler_type cosine": "--learning-rate-decay",
    "--warmup_ratio 0.03": "--warmup-steps",
    "--output_dir out": "--run-dir",
    "--logging_steps 10": "--log-every",
    "--save_steps 500": "--save-every",
    "--save_total_limit 3": "--max-to-keep",
    "--eval_steps 500": "--validation-every",
    "--fp16 True": "--precision fp16",
    "--gradient_checkpointing": "--recompute full",
    "--model_name_or_path gpt2": "--init-from",
    "--resume_from_checkpoint out": "--resume",
    "--report_to tensorboard": "--tensorboard",
    "--max_grad_norm 1.0": "--clip-norm",
    "--adam_beta1 0.9": "--beta1",
    "--adam_epsilon 1e-8": "--epsilon",
    "--deepspeed ds.json": "--zero",
    "--fsdp full_shard": "--zero 3",
    # torchtitan
    "--training.seq_len 4096": "--sequence-length",
    "--training.local_batch_size 2": "--microbatch-size",
    "--training.steps 100": "--steps",
    "--parallelism.tensor_parallel_degree 8": "--tensor",
    "--parallelism.pipeline_parallel_degree 4": "--pipe",
    "--parallelism.data_parallel_shard_degree 8": "--zero 3",
    "--parallelism.pipeline_parallel_schedule 1F1B": "--schedule",
    "--activation_checkpoint.mode full": "--recompute",
    "--optimizer.lr 3e-4": "--learning-rate",
    "--model.flavor 8B": "--model",
    "--checkpoint.folder out": "--run-dir",
    "--checkpoint.interval 100": "--save-every",
    "--metrics.log_freq 10": "--log-every",
    "--lr_scheduler.warmup_steps 100": "--warmup-steps",
    "--seq_len 4096": "--sequence-length",
    # DeepSpeed
    "--train_micro_batch_size_per_gpu 4": "--microbatch-size",
    "--gradient_clipping 1.0": "--clip-norm",
    "--zero_optimization.stage 3": "--zero",
    "--steps_per_print 10": "--log-every",
    # no tool's
    "--epochs 3": "--steps",
    "--num-epochs 3": "--steps",
    "--batch-size 32": "--microbatch-size",
    "--bs 32": "--global-batch-size",
    "--max-length 512": "--sequence-length",
    "--ctx 512": "--sequence-length",
    "--tp 2": "--tensor",
    "--pp 2": "--pipe",
    "--dp 2": "--data",
    "--gpus 8": "--devices",
    "--num-gpus 8": "--devices",
    "--nnodes 2": "--processes",
    "--nproc-per-node 8": "--processes",
    "--wandb": "--track wandb",
    "--verbose": "--log-every",
    # ours, with underscores or misspelled
    "--global_batch_size 8": "--global-batch-size",
    "--Learning_Rate 8": "--learning-rate",
    "--layer 4": "--layers",
    "--lora_r 8": "--lora",
    "--lora_target_modules q_proj": "--lora-targets",
    "--ema 0.999": "--ema-decay",
    "--learning-rat 4": "--learning-rate",
}
NO_OPTION = {
    "--compile=False": "not needed: always on",
    "--torch_compile": "not needed: always on",
    "--compile.enable": "not needed: always on",
    "--sequence-parallelism": "did you mean --sequence-parallel",
    "--overlap-grad-reduce": "not needed",
    "--kv-lora-rank 512": "it is --kv-latent here",
    "--decoder-num-layers 2": "not supported: no encoder-decoder models",
    "--load_best_model_at_end": "megajax evaluate",
    "--autotuning run": "megajax plan",
    "--optim adafactor": "it is --optimizer here",
    "--load_in_4bit": "not supported",
    "--zzz": "--help lists every option",
}
OTHER_COMMANDS = [  # command, words, part of the message
    (
        "plan",
        "--lr 1",
        "it is --learning-rate of megajax train (Megatron-LM's --lr), and this command has no such option",
    ),
    ("plan", "--learning-rate 1", "in this command: it is one of megajax train"),
    ("plan", "--num-gpus 8", "it is --gpus here"),
    ("plan", "--micro-batch-size 1", "it is --microbatch-size here"),
    ("plan", "--bf16", "it is --precision bf16 here"),
    ("generate", "--max_new_tokens 9", "it is --new-tokens here"),
    ("generate", "--batch-size 9", "it is --batch here"),
    ("generate", "--model gpt2", "it is --init-from DIR here"),
    ("evaluate", "--tasks hellaswag", "it is --harness TASK,TASK here"),
    ("evaluate", "--learning-rate 1", "in this command: it is one of megajax train"),
    ("preprocess", "--json-keys text", "it is --keys here"),
    ("preprocess", "--append-eod", "not needed"),
    ("export", "--output_dir x", "it is --out DIR here"),
    ("launch", "--nnodes 2", "it is --nodes MIN:MAX here"),
    ("failures", "--tp 2", "it is --tensor of megajax train"),
    ("train", "--spares 3", "in this command: it is one of megajax failures"),
]


SHARED = {"--run-dir"}  # of the launcher, which reads it from the training's command line


def flags(command):
    own = COMMAND_OPTIONS.get(command, frozenset())
    return own or TRAINING


@pytest.mark.parametrize(("words", "option"), TYPED.items())
def test_what_users_of_other_tools_type_names_the_option_here(words, option):
    message = describe_unknown(words.split(), TRAINING)
    given = words.partition("=")[0].split()[0]
    assert message.startswith(f"there is no option {given}: ") and "\n" not in message
    named = message.removeprefix(f"there is no option {given}: ")
    assert named.startswith((f"it is {option}", f"it is spelled {option}", f"did you mean {option}")) or (
        "it is --data here" in named and option in named
    )


@pytest.mark.parametrize(("words", "part"), NO_OPTION.items())
def test_what_has_no_option_here_says_why(words, part):
    assert part in describe_unknown(words.split(), TRAINING)


@pytest.mark.parametrize(("command", "words", "part"), OTHER_COMMANDS)
def test_a_command_names_its_own_options_only(command, words, part):
    message = describe_unknown(words.split(), flags(command))
    assert part in message
    if " here" in message:
        assert set(OPTION.findall(message.partition("it is ")[2].partition(" here")[0])) <= flags(command)


def test_each_of_several_unknown_options_is_named():
    message = describe_unknown(["--lr", "-3e-4", "--bs", "8", "--lr", "1"], TRAINING)
    assert message.count("there is no option") == 2


def test_a_word_that_is_no_option():
    assert "'tiny' is not an option" in describe_unknown(["tiny"], TRAINING)


def test_the_tables_are_large_and_name_options_that_exist():
    assert sum(map(len, TOOLS.values())) + len(COMMON) >= 300
    for entries in (*TOOLS.values(), COMMON):
        for name, entry in entries.items():
            assert set(options_of(entry)) <= TRAINING | {"--no-tied-embeddings", "--no-biases"}, name
            assert entry[0] or entry[1], name
            outside = {
                "--nodes",
                "--processes-per-node",
                "--workers",
                "--epochs",
                "--deterministic",
            }  # of other commands
            remark = set(OPTION.findall(entry[1])) - outside
            assert remark <= TRAINING | {"--no-sequence-parallel"}, name
    for command, entries in OF_COMMANDS.items():
        for name, entry in entries.items():
            assert set(OPTION.findall(" ".join(entry))) <= flags(command) | SHARED, (command, name)


@pytest.mark.parametrize("command", [name for name in ALL if not name.startswith("bench")])
def test_the_table_of_commands_has_the_parsers_options(command):
    """What differs is to be changed in megajax/config/command_options.py."""
    found = parsers_options(command)
    if TRAINING <= found:
        found -= TRAINING
    assert found == COMMAND_OPTIONS.get(command, frozenset())


def test_the_page_has_the_tables():
    """`python -m tests.config.make_coming_from` writes it."""
    assert PAGE.read_text().endswith(tables())


ELSEWHERE = [  # commands whose parsers are not in COMMAND_OPTIONS, or do not read these tables
    ("megajax.schedules.draw", "--pp 4", "it is --pipe here"),
    ("megajax.schedules.draw", "--num_microbatches 4", "it is --microbatches here"),
    ("megajax.schedules.draw", "--microbatch 4", "did you mean --microbatches"),
    ("benchmarks.schedules", "--tensor-model-parallel-size 2", "it is --tensor of megajax train (Megatron-LM's"),
    ("benchmarks.loss_curve", "--outt x.svg", "did you mean --out"),
    ("benchmarks.compiled", "time --learning-rate 1", "it is one of megajax train"),
    ("benchmarks.published.__main__", "--lr 1", "this command has no such option"),
]


@pytest.mark.parametrize(("module", "words", "part"), ELSEWHERE)
def test_drawing_and_benchmarks_answer_likewise(module, words, part, capsys):
    assert importlib.import_module(module).main(words.split()) == 2
    output = capsys.readouterr()
    assert part in output.err and output.err.startswith("error: ") and output.err.count("\n") == 1 and not output.out


def test_the_synonyms_of_the_drawing_are_options_of_it():
    named = {OPTION.findall(option)[0] for option in draw.SYNONYMS.values()}
    assert named <= COMMAND_OPTIONS["draw"] and not set(draw.SYNONYMS) & COMMAND_OPTIONS["draw"]

"""Which command has which option, to say so where another command is given it. tests/config/test_unknown_options.py compares
the table with the commands' parsers, and renews it.
"""

from megajax.config.errors import option
from megajax.config.launch import LaunchConfig
from megajax.config.model import ModelConfig
from megajax.config.sections import GROUPS, option_names


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODEL, LAUNCH = (frozenset(map(option, option_names(config))) for config in (ModelConfig, LaunchConfig))
# Of the training command.
TRAINING = frozenset(option(name) for group in GROUPS for name in group.names)
TRAINING |= {"--model", "--config", "--import", "--trust", "--devices", "--dry-shapes"}

# Of the others, without --help; of those that take all options of the training, the other options.
COMMAND_OPTIONS: dict[str, frozenset[str]] = {
    "finetune": _words("--epochs"),
    "dpo": _words("--beta --desirable-weight --epochs --loss-type --pairs --undesirable-weight"),
    "grpo": _words(
        "--beta --epsilon-high --loss-type --max-completion-length --num-generations --num-iterations --prompts --reward "
        "--scale-rewards --use-bias-correction-kl"
    ),
    "finetune-bert": _words("--epochs --seeds"),
    "launch": _words(
        "--address --hang-timeout --join-wait --max-failures --node-timeout --nodes --processes-per-node --rendezvous "
        "--wait-minutes"
    ),
    "preprocess": _words(
        "--bad-lines --documents --end-of-document --input --keys --longest-document --no-end-of-document --out --overwrite "
        "--ray --shard --shards --split --split-sentences --subset --text-documents --tokenizer --workers"
    ),
    "inspect": _words("--arrays --batch --html --picture --sample --statistics --trust --verify"),
    "import": LAUNCH | _words("--end-of-document --mtp-num-layers --run-dir --sequence-length --tokenizer"),
    "import-megatron": LAUNCH | _words("--end-of-document --run-dir --sequence-length --step --tokenizer --vocabulary"),
    "export": LAUNCH | _words("--dtype --ema --max-shard-size --out --peft --step"),
    "generate": LAUNCH
    | _words(
        "--apply-chat-template --batch --chat-template --data --devices --ema --generation-config --ignore-end --init-from "
        "--interactive --min-new-tokens --min-p --new-tokens --no-repeat-ngram-size --out --pipe --precision "
        "--prefill-chunk --prompt --prompts --repetition-penalty --run-dir --seed --step --stop --system-prompt "
        "--temperature --trust --tensor --top-k --top-p"
    ),
    "evaluate": LAUNCH
    | _words(
        "--apply-chat-template --batch --context --data --devices --ema --fewshot-as-multiturn --generation-config "
        "--harness --include-path --init-from --last-token --limit --num-fewshot --out --pipe --precision --run-dir --step "
        "--stride --system-instruction --task --task-data --tensor --trust --window --zero"
    ),
    "evaluate-squad": _words("--no-answer --out --predictions --rules --task-data --threshold"),
    "plan": MODEL
    | _words(
        "--attention --budget --calibrate --cluster --compare --compile --context --deadline --ema-decay --expert "
        "--expert-tensor --explain --fp8 --freeze --global-batch-size --gpu --gpus --html --import --json "
        "--memory-margin --microbatch-size --model --optimizer --out --plot --precision --recompute --scaling --schedule "
        "--search --tokens --top --vocab-parallel --zero"
    ),
    "dryrun": _words("--cluster --gpu --import --json --model-only --run --save-hlo --timeout"),
    "calibrate": LAUNCH | _words("--calibrate --cluster --devices --gpu --host-size --import --precision"),
    "failures": _words(
        "--gpu-mtbf --gpus --interval --jitter --plot --repair --restart --save --slow-by --slow-hosts --spares --write"
    ),
    "sites": _words(
        "--data --gbps --gpu --jitter --latency --microbatch-size --microbatches --model --pipe --plot "
        "--recompute --schedule --seed --sites --tensor"
    ),
    "draw": _words(
        "--chunks --compare --costs --group-size --import --json --latency --live-chunks --lockstep "
        "--microbatches --out --pipe --save --schedule --text --trace"
    ),
    "verify": _words("--a --against --b --deterministic --experiment --json --record --resume --steps"),
    "validate": _words("--fit"),
    "papers": _words("--compile --only --plot"),
}

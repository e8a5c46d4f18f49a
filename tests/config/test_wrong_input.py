"""Mistakes on the command line: one line that says what is wrong and which option to pass, and exit code 2."""

import pytest

from experiments import gpt3

# Options whose value must not be empty.
TEXTS = ("config", "data-cache", "devices", "end-of-document", "import", "log-jsonl", "model", "profile", "resume")
TEXTS += ("run-dir", "schedule", "split", "text", "tokenizer", "coordinator", "axis-order")
WRONG = [
    ("--model gtp2", ["gtp2", "did you mean gpt2", "--model"]),
    ("--shedule gpipe", ["--shedule", "did you mean --schedule"]),
    ("--pipe 5 --tensor 1 --data 1 --devices cpu:5", ["layers = 4", "--pipe 1, 2, 3 or 4"]),
    ("--pipe 2 --tensor 3 --data 1 --devices cpu:6", ["tensor = 3", "--tensor"]),
    (
        "--data 4 --pipe 4 --tensor 4 --microbatch-size 1 --devices cpu:8",
        ["64 devices", "there are 8", "--devices cpu:64"],
    ),
    ("--data 0", ["data = 0", "1 or more", "--data"]),
    ("--data -1", ["data = -1", "--data"]),
    ("--tensor 0", ["tensor = 0", "--tensor"]),
    ("--pipe 0", ["pipe = 0", "--pipe"]),
    ("--chunks 0", ["chunks = 0", "--chunks"]),
    ("--microbatch-size 0", ["microbatch_size = 0", "--microbatch-size"]),
    ("--layers 0", ["layers = 0", "--layers"]),
    ("--heads 0", ["heads = 0", "--heads"]),
    ("--kv-heads 3", ["kv_heads = 3", "--kv-heads"]),
    ("--seed -1", ["seed = -1", "--seed"]),
    (
        "--seed 99999999999999999999",
        ["seed = 99999999999999999999", "0 or more and below 4294967296", "--seed"],
    ),
    ("--steps 0", ["steps = 0", "1 or more"]),
    ("--steps -5", ["steps = -5", "1 or more"]),
    ("--steps 3 --warmup-steps 9", ["warmup_steps = 9", "--warmup-steps 0"]),
    ("--learning-rate nan", ["learning_rate = nan", "--learning-rate"]),
    ("--learning-rate inf", ["learning_rate = inf", "--learning-rate"]),
    ("--axis-order pipe,data", ["axis_order", "--axis-order data,pipe,tensor"]),
    ("--devices gpu", ["no GPU", "--devices cpu:8"]),
    ("--devices cpu:", ["cpu:", "--devices cpu:8"]),
    ("--devices cpu:0", ["cpu:0", "--devices cpu:8"]),
    ("--devices cpu:99", ["devices = cpu:99", "already started with 8 CPU device"]),
    ("--text .", ["directory", "--text"]),
    ("--log-jsonl .", ["cannot write the log .: Is a directory", "--log-jsonl"]),
    ("--sequence-length 20000000 --positions rotary", ["tokens", "--sequence-length"]),
    ("--temperature -1", ["temperature = -1", "--temperature"]),
    ("--temperature nan", ["temperature = nan", "--temperature"]),
    ("--top-k 0", ["top_k = 0", "--top-k"]),
    ("--new-tokens -1", ["new_tokens = -1", "--new-tokens"]),
    ("--model gpt3-175b --pipe 97 --dry-shapes", ["layers = 96", "--pipe 93, 94, 95 or 96"]),
    ("--model gpt3-175b --pipe 0 --dry-shapes", ["pipe = 0"]),
    ("--vocabulary 10", ["257", "10", "--vocabulary 257"]),
    ("--norm batchnorm", ["batchnorm", "layernorm"]),
    ("--sequence-parallel=yes", ["--sequence-parallel", "'yes'"]),
    ("--schedule none.csv", ["cannot read none.csv", "No such file"]),
    ("--schedule zb_h1 --live-chunks 3", ["live_chunks = 3", "--schedule auto"]),
    ("--schedule 1f1b --group-size 3", ["group_size = 3", "--schedule interleaved_1f1b"]),
    ("--schedule auto --pipe 2 --live-chunks 1", ["live_chunks is 1", "2 chunks"]),
    (
        "--schedule dualpipe_v --pipe 2 --global-batch-size 8 --data 2",
        ["takes at least 4 microbatches on 2 stages, not 2", "size 16 or more"],
    ),
    ("--schedule zb_v --pipe 2 --chunks 1", ["zb_v has two chunks", "--chunks 2"]),
    ("--schedule pipedream_2bw --precision fp16", ["fp16", "--precision bf16"]),
    *((f"--{name}=", [f"--{name}: '' must not be empty"]) for name in TEXTS),
    ("--run-dir " + "x" * 300, ["is longer than the name of a file can be"]),
    ("--import=--", ["--import: '--' is not a value"]),
    ("--data-path=", ["--data-path: '' must not be empty"]),
    ("--run-dir \0", ["--run-dir: '\\x00' has control characters"]),
    ("--devices cpu:100000", ["'100000' CPU devices are too many", "--devices cpu:512"]),
    ("--devices cpu:" + "9" * 200, ["CPU devices are too many"]),
    ("--data 100000000", ["100000000 CPU devices are too many"]),
    ("--global-batch-size 4000000000", ["global_batch_size = 4000000000", "below 2147483648"]),
    ("--global-batch-size 2000000000 --steps 3", ["6000000000 samples must be below 2**31: pass --steps 1."]),
    (
        "--global-batch-size 2000000000 --steps 1",
        ["at most 262144 forwards", "--global-batch-size 262144, or a larger --microbatch-size"],
    ),
    ("--steps " + "9" * 5000, ["is not a whole number"]),
    ("--peer-timeout 1e300", ["peer_timeout = 1e+300", "below 100000000"]),
    ("--learning-rate 1e300", ["learning_rate = 1e+300", "below 3.4e+38"]),
    ("--batch-ramp 1,1,100 --global-batch-size 4096 --steps 1", ["has 4096 batch sizes", "--batch-ramp 1,5,100"]),
    ("--resume " + "9" * 200 + " --run-dir a", ["is not a step", "--resume auto"]),
    ("--profile 1:" + "9" * 200 + " --run-dir a", ["is not START:STOP"]),
    ("--coordinator :1 --processes 2 --process-id 0", ["is not HOST:PORT"]),
    ("--coordinator a:99999 --processes 2 --process-id 0", ["is not HOST:PORT"]),
    ("--dry-shapes --temperature nan", ["temperature = nan", "--temperature"]),
]


@pytest.mark.parametrize(("words", "expected"), WRONG, ids=[words[:40] for words, _ in WRONG])
def test_what_cannot_run_is_one_line_and_exit_code_2(words, expected, capsys):
    assert gpt3.main(words.split()) == 2
    out, err = capsys.readouterr()
    print(err)
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    for part in expected:
        assert part in err

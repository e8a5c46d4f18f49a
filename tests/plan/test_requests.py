"""Infeasible and mistyped requests of the planner: exit code 2, and one line that says what to pass."""

import pytest

from megajax.plan.__main__ import main

BATCH = "--global-batch-size 64"
RUN = f"--model gpt3-175b --gpus 64 --gpu h100-80gb {BATCH}"
FILES = {
    "ours.toml": 'gpu = "h100-80gb"\ngpus = 64\nprice = 2.5\n',
    "free.toml": 'gpu = "h100-80gb"\ngpus = 64\n',
    "none.toml": "price = 2.5\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def one_line(command, words, capsys) -> str:
    """The error of a command; nothing is printed besides."""
    assert command(words.split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "the following arguments are required: --global-batch-size"),
        (f"--model gpt3-175b {BATCH}", "gpu is not given: pass --gpu a100-40gb|"),
        (f"--gpu b200 {BATCH}", "model is not given: pass --model NAME, or --budget MONEY"),
        (f"--model gpt3-175 --gpu b200 --gpus 8 {BATCH}", "did you mean gpt3-175b"),
        (f"--model gpt3-175b --gpu h100 --gpus 8 {BATCH}", "gpu = 'h100' is not known: did you mean h100-"),
        (f"--model gpt3-175b --gpu b200 {BATCH}", "gpus is not given: pass --gpus COUNT, write gpus = COUNT"),
        (f"--model gpt3-175b --gpu b200 --gpus 1e3 {BATCH}", "--gpus: '1e3' is not a whole number"),
        (f"--model gpt3-175b --gpu b200 --gpus 2000000 {BATCH}", "1 or more and below 1000001"),
        ("--model gpt3-1.3b --gpu b200 --gpus 97 --global-batch-size 64", "the nearest with good layouts: pass --gpus"),
        (f"{RUN} --tokns 8", "there is no option --tokns: did you mean --tokens?"),
        (f"{RUN} --microbatch-size 3", "with --microbatch-size 3: omit --microbatch-size"),
        (f"{RUN} --expert 2", "expert = 2, but gpt3-175b has no experts: omit --expert"),
        (f"--model mixtral-8x7b --gpu b200 --gpus 8 {BATCH} --expert 3", "pass --expert 1 2 4 8."),
        (f"--model mixtral-8x7b --gpu b200 --gpus 8 {BATCH} --expert-tensor 2", "'2' is neither tensor nor 1"),
        (f"{RUN} --expert-tensor 1", "with --expert-tensor 1: omit --expert-tensor"),
        (f"{RUN} --hidden 100", "hidden = 100 is not a multiple of heads = 96: pass --heads"),
        (f"{RUN} --tokens nan", "--tokens: nan must be a number, above 0"),
        (f"{RUN} --memory-margin 2", "--memory-margin: 2.0 must be a number, 0 or more and below 1"),
        (f"{RUN} --import none.py", "cannot import none.py"),
        # goals
        (f"{RUN} --budget 1e6", "pass --cluster FILE.toml with a line such as price = 2.5"),
        (f"--cluster free.toml --budget 1e6 {BATCH}", "budget needs the price of a GPU for an hour"),
        (f"--cluster ours.toml --budget much {BATCH}", "--budget: 'much' is not a number"),
        (f"--cluster ours.toml --budget 1e5 --layers 3 {BATCH}", "layers is of a model, which is not given"),
        (f"{RUN} --deadline 60 --budget 3", "--budget: not allowed with argument --deadline"),
        (
            f"{RUN} --deadline 10",
            "needs 368 GPUs or more, even at their peak; --gpus allows 64: pass a longer --deadline",
        ),
        (f"{RUN} --deadline 60 --tokens 1e17", "--gpus allows 64: pass a longer --deadline, fewer --tokens"),
        (f"--model gpt3-13b --gpu b200 {BATCH} --deadline 1e-3", "a global batch of 64 has work for 20,480 at most"),
        # clusters
        (f"--cluster other.toml --model gpt3-13b {BATCH}", "cluster = other.toml cannot be read: No such file"),
        (f"--cluster none.toml --model gpt3-13b {BATCH}", "cluster = none.toml has no gpu: write a line such as"),
        (f"--cluster . --model gpt3-13b {BATCH}", "cluster = . cannot be read: Is a directory"),
        (f"--cluster ours.toml --gpu b200 --model gpt3-13b {BATCH}", "--gpu: not allowed with argument --cluster"),
        (f"--compare --model gpt3-13b {BATCH}", "--compare: expected at least one argument"),
        (f"--compare ours.toml other.toml --model gpt3-13b {BATCH}", "cluster = other.toml cannot be read"),
        (f"--compare ours.toml free.toml {BATCH}", "model is not given"),
        (f"--compare ours.toml free.toml --model gpt3-13b {BATCH} --html x.html", "compare prints one table: omit"),
    ],
)
def test_the_planner(words, says, capsys):
    assert says in one_line(main, words, capsys)


def test_what_does_not_fit_is_exit_code_1(capsys):
    assert main(f"--model gpt3-1t --gpus 1 --gpu a10g {BATCH}".split()) == 1
    assert "pass a smaller --model, or a --gpu with more memory" in capsys.readouterr().out

"""Budgets, deadlines, comparisons, JSON and the nearest numbers of GPUs, by the planner's command."""

import json
import math
import re
import tomllib

import pytest

from megajax.plan.__main__ import main

LEAN = "--schedule 1f1b --microbatch-size 2 --recompute selective --top 1"
MODEL = "--model gpt3-6.7b"


@pytest.fixture
def plan(tmp_path, capsys):
    """A function: the command's exit code, what it prints, and its error."""

    def run(words):
        code = main([*words.split(), *LEAN.split(), "--out", str(tmp_path / "plan.toml")])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def cluster(tmp_path):
    def write(name, text):
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return path

    return write


def test_json_has_the_layout_its_time_and_cost(plan, cluster):
    ours = cluster("ours", 'gpu = "h100-80gb"\ngpus = 64\nprice = 2\nwatts = 1000')
    code, out, _ = plan(f"{MODEL} --cluster {ours} --global-batch-size 256 --tokens 1e11 --json")
    found = json.loads(out)
    (layout,) = found["layouts"]
    parallel = layout["parallel"]
    assert code == 0 and parallel["data"] * parallel["pipe"] * parallel["tensor"] == found["gpus"] == 64
    days = 1e11 / (256 * 2048) * layout["step_seconds"] / 86400
    assert layout["days"] == pytest.approx(days)
    assert layout["cost"]["money"] == pytest.approx(days * 24 * 64 * 2)
    assert layout["cost"]["megawatt_hours"] == pytest.approx(days * 24 * 64 * 1e-3)
    assert layout["step_seconds"] == pytest.approx(sum(layout["seconds_by_part"].values()))
    assert layout["memory_bytes"] == sum(layout["memory_bytes_by_part"].values())


def test_json_says_what_to_pass_if_nothing_fits(plan):
    code, out, _ = plan("--model gpt3-175b --gpu a100-40gb --gpus 8 --global-batch-size 8 --json")
    found = json.loads(out)
    assert code == 1 and found["layouts"] == [] and found["remedy"].startswith("pass ")


def test_clusters_are_compared(plan, cluster):
    one = cluster("slow", 'gpu = "a100-80gb"\nprice = 1')
    two = cluster("fast", 'gpu = "h100-80gb"\nprice = 2.5\ncurrency = "EUR"')
    code, out, _ = plan(f"{MODEL} --compare {one} {two} --gpus 32 --global-batch-size 256")
    rows = {line.split()[0]: line.split() for line in out.splitlines()[2:]}
    assert code == 0 and set(rows) == {"slow", "fast"}
    assert rows["slow"][-1] == "USD" and rows["fast"][-1] == "EUR"
    days = {name: float(row[10]) for name, row in rows.items()}
    assert days["fast"] < days["slow"]
    for name, price in (("slow", 1), ("fast", 2.5)):
        assert float(rows[name][-2].replace(",", "")) == pytest.approx(days[name] * 24 * 32 * price, rel=0.01)


def test_a_comparison_in_which_nothing_fits_fails_and_says_what_to_pass(plan, cluster):
    small, large = cluster("small", 'gpu = "a100-40gb"\ngpus = 8'), cluster("large", 'gpu = "a100-80gb"\ngpus = 512')
    code, out, _ = plan(f"--model gpt3-175b --compare {small} --global-batch-size 512")
    assert code == 1 and "nothing fits: pass --gpus" in out
    code, out, _ = plan(f"--model gpt3-175b --compare {small} {large} --global-batch-size 512")
    assert code == 0 and "nothing fits" in out
    code, _, error = plan(f"--model gpt3-175b --compare {small} --global-batch-size 7")
    assert code == 2 and "global batch of 7" in error


def test_a_deadline_is_met_by_the_fewest_gpus(plan):
    """It is missed on the host before, and the days are those of the plan that is written."""
    code, out, _ = plan(f"{MODEL} --gpu a100-80gb --global-batch-size 256 --tokens 1e11 --deadline 20")
    words = out.splitlines()[0].split()
    assert code == 0 and words[:3] == ["deadline", "20", "days"]
    gpus, days, fewer, longer = (float(words[at].rstrip(";")) for at in (6, 9, 10, 13))
    assert days <= 20 < longer and fewer < gpus
    code, out, _ = plan(f"{MODEL} --gpu a100-80gb --gpus {fewer:.0f} --global-batch-size 256 --tokens 1e11 --json")
    assert json.loads(out)["layouts"][0]["days"] == pytest.approx(longer, abs=0.05)


def test_a_budget_buys_tokens(plan, cluster):
    ours = cluster("ours", 'gpu = "a100-80gb"\ngpus = 32\nprice = 2')
    code, out, _ = plan(f"{MODEL} --cluster {ours} --global-batch-size 256 --budget 1e5 --json")
    found = json.loads(out)
    assert code == 0 and found["layouts"][0]["cost"]["money"] == pytest.approx(1e5)
    code, out, _ = plan(f"{MODEL} --cluster {ours} --global-batch-size 256 --budget 1e5")
    assert out.startswith("budget 100,000 USD: 65.1 days of 32 GPUs")  # 1e5 / 2 / 32 / 24


def test_a_budget_names_the_model_of_chinchillas_rule(plan, cluster):
    """The rule's size is sqrt(C / 120), C being what the GPUs compute at the winner's utilisation."""
    ours = cluster("ours", 'gpu = "a100-80gb"\ngpus = 32\nprice = 2')
    code, out, _ = plan(f"--cluster {ours} --global-batch-size 256 --budget 3e4")
    lines = out.splitlines()
    (chosen,) = [line for line in lines if line.endswith("<- nearest to the rule")]
    name, mfu = chosen.split()[0], float(chosen.split("%")[0].split()[-1]) / 100
    size = math.sqrt(mfu * 312e12 * 3e4 / 2 * 3600 / 120) / 1e9
    assert code == 0 and float(lines[1].split("rule ")[1].split("B")[0]) == pytest.approx(size, abs=0.1)
    assert any(line.startswith(f"{name}: ") for line in lines)
    ratios = [float(line.split()[4]) / 20 for line in lines if "a parameter" in line]
    assert len(ratios) == 4 and min(ratios, key=lambda one: abs(math.log(one))) == float(chosen.split()[4]) / 20


def test_the_nearest_good_numbers_of_gpus_are_named(plan):
    code, _, error = plan(f"{MODEL} --gpu a100-80gb --gpus 37 --global-batch-size 256")
    assert code == 2 and error.startswith(
        "error: no layout of gpt3-6.7b over 37 GPUs takes a global batch of 256; the nearest"
    )
    assert "--gpus 32 (tensor " in error and error.count("\n") == 1


def test_a_number_of_gpus_that_divides_badly_is_said_so(plan):
    code, out, _ = plan(f"{MODEL} --gpu a100-80gb --gpus 31 --global-batch-size 248 --zero 0")
    (line,) = [line for line in out.splitlines() if "divide badly" in line]
    assert code == 0 and "--gpus 32 (" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{MODEL} --global-batch-size 8 --gpus 8", "gpu is not given: pass --gpu a100-40gb|"),
        (f"{MODEL} --global-batch-size 8 --gpu b200", "gpus is not given: pass --gpus COUNT"),
        ("--global-batch-size 8 --gpus 8 --gpu b200", "model is not given: pass --model NAME, or --budget MONEY"),
        ("--global-batch-size 8 --gpus 8 --gpu b200 --budget 9 --layers 3", "layers is of a model, which is not given"),
        (
            f"{MODEL} --global-batch-size 8 --gpus 8 --gpu b200 --budget 9",
            "budget needs the price of a GPU for an hour",
        ),
        (f"{MODEL} --global-batch-size 8 --gpu b200 --cluster x.toml", "--cluster: not allowed with argument --gpu"),
        (f"{MODEL} --global-batch-size 8 --gpus 8 --cluster none.toml", "cluster = none.toml cannot be read"),
        (f"{MODEL} --global-batch-size 8 --gpus 8 --compare none.toml --json", "cluster = none.toml cannot be read"),
        (f"{MODEL} --global-batch-size 8 --gpu b200 --deadline 0", "--deadline: 0.0 must be a number, above 0"),
        (
            f"{MODEL} --global-batch-size 8 --gpu b200 --deadline 1 --budget 5",
            "--budget: not allowed with argument --deadline",
        ),
        (
            f"{MODEL} --global-batch-size 8 --gpu b200 --deadline 0.001",
            "has work for 2,048 at most: pass a longer --deadline",
        ),
        (f"{MODEL} --global-batch-size 8 --gpu b201 --gpus 8", "gpu = 'b201' is not known: did you mean b200"),
        (f"{MODEL} --global-batch-size 8 --gpu b200 --budget -5", "--budget: -5.0 must be a number, above 0"),
    ],
)
def test_a_wrong_request_is_one_line(words, says, plan):
    code, _, error = plan(words)
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1 and says in error


def test_a_row_for_each_number_of_gpus(plan, cluster):
    ours = cluster("ours", 'gpu = "h100-80gb"\nprice = 2')
    code, out, _ = plan(f"{MODEL} --cluster {ours} --global-batch-size 64 --tokens 1e10 --scaling 1 8 16")
    head, names, *rows = (line.split() for line in out.splitlines())
    assert code == 0 and head[:3] == ["gpt3-6.7b", "on", "h100-80gb,"] and names[0] == "GPUs"
    assert rows[0] == "1 no layout is legal and fits".split()
    for gpus, row in zip((8, 16), rows[1:], strict=True):
        seconds, tokens, days, hours, money = (float(row[i].replace(",", "")) for i in (6, 7, 9, 10, 12))
        assert int(row[0]) == gpus and int(row[1]) * int(row[2]) * int(row[3]) * int(row[4]) == gpus
        assert tokens == pytest.approx(64 * 2048 / seconds, rel=0.01) and money == pytest.approx(2 * hours, abs=2)
        assert hours == pytest.approx(1e10 / tokens * gpus / 3600, rel=0.01) and days > 0


def test_a_layout_that_was_expected_is_compared_with_the_fastest(plan):
    words = f"{MODEL} --gpu h100-80gb --gpus 8 --global-batch-size 64"
    code, out, _ = plan(f"{words} --explain t8 p1 z1")
    (line,) = [line for line in out.splitlines() if line.startswith("t8 p1 z1: the best of ")]
    assert code == 0 and "% , most" not in line and re.search(r"\(\+\d+%, most of it \w+: \+", line)
    parts = [line.split() for line in out.splitlines() if line.startswith("  blocks ")]
    assert len(parts) == 1 and parts[0][1] != parts[0][3]
    out = plan(f"{words} --explain t3")[1]
    assert "t3: no such layout is legal." in out
    assert (
        "t16: no such layout is legal. The sizes of a mesh multiply to the 8 GPUs" in plan(f"{words} --explain t16")[1]
    )
    code, _, error = plan(f"{words} --explain tall")
    assert code == 2 and error.startswith("error: explain = tall is not a size, a schedule or a recompute mode")


def test_a_directorys_model_is_planned(plan, tmp_path):
    values = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16}
    values |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5}
    values |= {"max_position_embeddings": 4096, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False}
    values |= {"architectures": ["LlamaForCausalLM"]}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    code, out, error = plan(f"--model {folder} --gpu h100-80gb --gpus 8 --global-batch-size 64 --sequence-length 2048")
    assert code == 0, error
    written = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert written["train"]["init_from"] == str(folder) and "options" not in written
    assert written["model"] == {"sequence_length": 2048} and "0.9B parameters" in out

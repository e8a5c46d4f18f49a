"""Other programs that train a GPT, for comparison: each is a file that needs torch and not megajax.

A peer runs in its own process, with a Python that has its packages, after megajax's process has ended, so that they do not
share the GPU's memory. It reads one JSON object and writes a JSON line for each shape.
"""

import json
import pathlib
import subprocess
from collections.abc import Sequence

from megajax.config import RunConfig

HERE = pathlib.Path(__file__).parent
PEERS = {"PyTorch, torch.compile": HERE / "torch_gpt.py", "transformers GPT-2": HERE / "hugging_face.py"}
MISSING = 3  # exit code of a peer whose package is not installed; it says which on stderr


def run_peer(file: pathlib.Path, python: str, runs: Sequence[RunConfig], platform: str, rounds: int) -> list[dict]:
    """The peer's result for each one-device run, in order: "seconds" of a step and "versions", or "error", one line.

    `python` runs the script `file`; `platform`: "gpu" or "cpu"; `rounds`: steps to time.
    """
    request = {"platform": platform, "rounds": rounds, "shapes": [shape_of(run) for run in runs]}
    done = subprocess.run([python, str(file)], input=json.dumps(request), capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
    reason = (
        f"{last}: pip install torch transformers, or pass --peer-python PYTHON of a venv that has them"
        if done.returncode == MISSING
        else f"it exited with code {done.returncode}: {last}"
    )
    return answers + [{"error": reason}] * (len(runs) - len(answers))


def shape_of(run: RunConfig) -> dict:
    """The parameters of a run that a peer gets."""
    model = ("layers", "hidden", "heads", "vocabulary", "sequence_length")
    return {name: getattr(run.model, name) for name in model} | {
        "microbatch_size": run.parallel.microbatch_size,
        "microbatches": run.microbatches,
        "precision": run.train.precision,
    }

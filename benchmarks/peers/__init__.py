"""Other programs that train a GPT, timed beside megajax: each a file that needs torch and nothing of megajax.

A peer runs in a process of its own, with a Python that has what it needs, and after megajax's process has ended: so
neither takes the other's memory on the GPU. It reads one JSON object and writes a JSON line for each shape.
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
    """What the peer measured of each run, in their order: "seconds" of a step and "versions", or "error", in one line.

    Args:
      file: of the peer.
      python: that runs it.
      runs: on one device.
      platform: "gpu" or "cpu".
      rounds: steps to time.
    """
    request = {"platform": platform, "rounds": rounds, "shapes": [shape_of(run) for run in runs]}
    done = subprocess.run([python, str(file)], input=json.dumps(request), capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no word")
    reason = (
        f"{last}: pip install torch transformers, or type --peer-python PYTHON of a venv that has them"
        if done.returncode == MISSING
        else f"it ended with code {done.returncode}: {last}"
    )
    return answers + [{"error": reason}] * (len(runs) - len(answers))


def shape_of(run: RunConfig) -> dict:
    """What a peer is told of a run."""
    model = run.model
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "vocabulary": model.vocabulary,
        "sequence_length": model.sequence_length,
        "microbatch_size": run.parallel.microbatch_size,
        "microbatches": run.microbatches,
        "precision": run.train.precision,
    }

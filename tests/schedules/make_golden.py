"""Writes golden_orders.json: the orders of torch.distributed.pipelining's schedules, which the tests compare ours with.

Made once with torch 2.15 (`pip install torch numpy`, then `python tests/schedules/make_golden.py`); the tests need no
torch. torch's 1F1B is omitted: the table of its last rank, unlike what it runs, starts with microbatch 1. Its
interleaved zero bubble is omitted for sizes where its delay of W differs from the paper's; see SIZES.
"""

import json
import pathlib
import subprocess

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

SIZES = {
    "GPipe": [(2, 3, 1), (4, 8, 1)],
    "Interleaved1F1B": [(2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 10, 2), (4, 6, 2), (8, 12, 2)],
    "LoopedBFS": [(2, 4, 2), (4, 8, 2), (4, 4, 3)],
    "InterleavedZeroBubble": [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 8, 2)],
    "ZBVZeroBubble": [(2, 4, 2), (4, 8, 2), (4, 5, 2), (8, 16, 2)],
    "DualPipeV": [(2, 4, 2), (3, 7, 2), (4, 8, 2), (4, 11, 2), (8, 16, 2)],
}


def cell(action) -> str:
    """torch's text of an action."""
    if action is None:
        return ""
    return f"({';'.join(map(cell, action.sub_actions))})OVERLAP_F_B" if action.sub_actions else str(action)


def main() -> None:
    rows = []
    for name, sizes in SIZES.items():
        for stages, microbatches, chunks in sizes:
            ops = get_schedule_ops(name, stages, microbatches, chunks)
            orders = [" ".join(text for text in map(cell, rank) if text) for rank in ops]
            rows.append({"name": name, "sizes": [stages, microbatches, chunks], "orders": orders})
    source = subprocess.run(["python", "--version"], capture_output=True, text=True).stdout.strip()
    golden = {"made_by": f"torch {torch.__version__}, {source}", "schedules": rows}
    pathlib.Path(__file__).with_name("golden_orders.json").write_text(json.dumps(golden, indent=0) + "\n")


if __name__ == "__main__":
    main()

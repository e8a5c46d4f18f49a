"""A training process without training, for the launcher's tests: the run's directory has the step, and what to do.

RUN_DIR/step       rewritten by process 0, ten steps a second, from the last saved one
        saved      the step that was saved: the last one that SAVE_EVERY divides, or where the processes were asked to stop
        asked-...  the processes of this generation have been asked to stop
        starts     a line for each start of a process
        do-RANK    read and removed by this process: "exit 3", "stop" (SIGSTOP), "crash" (SIGKILL)
"""

import os
import pathlib
import signal
import sys
import time

from megajax.config.cli import Experiment, parse
from megajax.runtime.heartbeat import Heartbeat

EXPERIMENT = Experiment("A fake.", {"model": "tiny", "global_batch_size": 12, "microbatch_size": 1, "new_tokens": 0})
SLICE, SAVE_EVERY = 0.05, 5


def main() -> int:
    """Pretends to train until the last step."""
    asked = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda *_: asked.append(True))
    heartbeat, request = Heartbeat(os.environ), parse(None, EXPERIMENT)
    run, launch = pathlib.Path(request.output.run_dir), request.launch
    rank, processes = launch.process_id or 0, launch.processes or 1
    step, saved, command = run / "step", run / "saved", run / f"do-{rank}"
    all_asked = run / f"asked-{(launch.coordinator or str(os.getpid())).rpartition(':')[2]}"
    heartbeat.step = int(saved.read_text()) if saved.exists() else 0
    with open(run / "starts", "a") as starts:
        words = [rank, processes, request.given["data"], request.output.resume, os.getpid(), heartbeat.step]
        starts.write(" ".join(map(str, words)) + "\n")
    while heartbeat.step < request.given["steps"]:
        time.sleep(SLICE)
        if command.exists():
            word, _, value = command.read_text().partition(" ")
            command.unlink()
            if word == "exit":
                return int(value)
            os.kill(os.getpid(), {"stop": signal.SIGSTOP, "crash": signal.SIGKILL}[word])
        if rank == 0:
            heartbeat.step += 1
            write(step, heartbeat.step)
        elif step.exists():
            heartbeat.step = int(step.read_text())
        if rank == 0 and heartbeat.step % SAVE_EVERY == 0:
            write(saved, heartbeat.step)
        if asked or all_asked.exists():  # all processes of a training stop together
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)  # as a training that has stopped
            all_asked.touch()
            if rank == 0:
                write(saved, heartbeat.step)
            return 0
    heartbeat.finish()
    return 0


def write(path: pathlib.Path, number: int) -> None:
    """Replaces the file, which other processes read."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(str(number))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())

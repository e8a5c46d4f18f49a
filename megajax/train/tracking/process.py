"""The process in which a tracker's library runs; `tracker.Tracker` starts it. It imports no jax.

It reads lines of JSON: the request first, then {"record": ...}, {"artifact": path}, and {"end": ...} as the last one. It
answers with lines of JSON on the standard output that it was started with: {"logged": number of records}, {"message":
text}, {"problem": text} and {"ended": true}. What the library prints goes to standard error.
"""

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from typing import Any, TextIO

from megajax.train.tracking.libraries import LIBRARIES, Library

BATCH = 1000  # records that are logged together, and that are read ahead
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # for the training, which then ends the run here


def one_line(error: BaseException) -> str:
    """An error as a line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class Answers:
    """Lines to the training; it may be gone."""

    def __init__(self, file: TextIO):
        """`file`: receives the lines."""
        self._file = file

    def say(self, **answer: Any) -> None:
        """One line."""
        with contextlib.suppress(OSError, ValueError):
            self._file.write(json.dumps(answer) + "\n")
            self._file.flush()


def read_ahead(pipe: TextIO, found: queue.Queue) -> None:
    """The thread that reads the training's lines; a full queue makes it wait, then the pipe, then the training's queue."""
    for line in pipe:
        found.put(json.loads(line))
    found.put(None)


def take(found: queue.Queue) -> list[dict | None]:
    """All that has been read, at least one message, at most BATCH."""
    messages = [found.get()]
    while len(messages) < BATCH and messages[-1] is not None:
        try:
            messages.append(found.get_nowait())
        except queue.Empty:
            break
    return messages


def serve(library: Library, found: queue.Queue, answers: Answers) -> dict[str, Any]:
    """Passes messages on until the last one; returns how the run has ended. What fails is said once, and left out."""

    def attempt(action, *arguments) -> bool:
        try:
            action(*arguments)
        except Exception as error:
            answers.say(problem=one_line(error))
            print(f"{action.__name__}: {one_line(error)}", file=sys.stderr, flush=True)
            return False
        return True

    while True:
        records, messages = [], take(found)
        for message in [*messages, {}]:
            if message and "record" in message:
                records.append(message["record"])
                continue
            if records and attempt(library.log, records):
                answers.say(logged=len(records))
            records = []
            if message is None:
                return {"state": "failed", "reason": "the training's process has ended"}
            if "artifact" in message:
                attempt(library.artifact, message["artifact"])
            if "end" in message:
                return message["end"]


def main() -> int:
    """Runs until the training ends the run, or itself."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # where cores are few: a record that arrives does not interrupt the training
        os.nice(10)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    answers = Answers(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    pipe = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a library that asks for a key gets none
    request = json.loads(pipe.readline() or "null")
    if request is None:
        return 1
    try:
        library = LIBRARIES[request["library"]](request)
    except BaseException as error:
        answers.say(problem=one_line(error))
        raise
    answers.say(message=library.place)
    found: queue.Queue[dict | None] = queue.Queue(BATCH)
    threading.Thread(target=read_ahead, args=(pipe, found), daemon=True).start()
    end = serve(library, found, answers)
    signal.alarm(int(request["wait"]) + 1)  # kills this process, if the training no longer does
    try:
        library.end(end["state"], end["reason"])
    except Exception as error:
        answers.say(problem=one_line(error))
        raise
    answers.say(ended=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env bash
# The one command that every launcher runs, once a process. RUN_DIR must be seen by all hosts under the same name. The
# first start begins the run; every later one goes on from the newest checkpoint, on however many devices there are.
set -euo pipefail
: "${RUN_DIR:?set RUN_DIR to the directory of the run, on a file system that all hosts share}"
exec python -m experiments.gpt3 --run-dir "$RUN_DIR" --resume auto "$@"

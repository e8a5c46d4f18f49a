#!/usr/bin/env bash
# The command that every launcher runs, once per process. RUN_DIR is a directory that all hosts see under the same name.
# The first start begins the run; every later one resumes from the newest checkpoint, on any number of devices.
set -euo pipefail
: "${RUN_DIR:?set RUN_DIR to the directory of the run, on a file system that all hosts share}"
exec python -m experiments.gpt3 --run-dir "$RUN_DIR" --resume auto "$@"

#!/usr/bin/env bash
# The command that every launcher runs, once per process. RUN_DIR is a directory that all hosts see under the same name.
# The first start begins the run; every later one resumes from the newest checkpoint, on any number of devices.
# A launcher that starts it once per host sets PROCESSES_PER_HOST (scripts/kubernetes.yaml): then it starts one process
# for each GPU. If one fails, all end by themselves, within --peer-timeout.
set -euo pipefail
: "${RUN_DIR:?set RUN_DIR to the directory of the run, on a file system that all hosts share}"
train() {
    exec python -m experiments.gpt3 --run-dir "$RUN_DIR" --resume auto "$@"
}

count=${PROCESSES_PER_HOST:-1}
if ((count == 1)); then
    train "$@"
fi
pids=()
told=0
trap 'told=1; kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
for ((index = 0; index < count; index++)); do
    export CUDA_VISIBLE_DEVICES=$index JAX_PROCESS_ID=$((JOB_COMPLETION_INDEX * count + index))
    train "$@" &
    pids+=($!)
done
# An exit code of 1, 2 or 130 goes before those of processes that ended because of it: a new start would end the same way.
final=0
for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    while ((told)); do # the signal may have ended `wait`, and not the process
        told=0 again=0
        wait "$pid" || again=$?
        ((again == 127)) || code=$again # 127: it had ended
    done
    case $final,$code in
    1,* | 2,* | 130,* | *,0) ;;
    *) final=$code ;;
    esac
done
exit "$final"

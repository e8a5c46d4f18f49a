#!/usr/bin/env bash
# sbatch --export=ALL,RUN_DIR=/shared/runs/175b scripts/slurm.sh --model gpt3-175b --tensor 8 --pipe 8 --chunks 3 \
#     --tokenizer gpt2 --text /shared/corpus.jsonl.gz
# Eight hosts of eight GPUs, one process per GPU. For one process per host, pass --ntasks-per-node=1: jax then gives each
# process all GPUs of its host.
# In a container of scripts/Dockerfile: CONTAINER=registry.example.com#megajax:0.1.0, or a file .sqsh, with pyxis; a file
# .sif with Apptainer. CONTAINER_MOUNTS=/shared:/shared,/data:/data are its directories (default: RUN_DIR).
#SBATCH --job-name=megajax
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300   # five minutes before the end: save a checkpoint, exit 0
#SBATCH --requeue           # after a host failure
#SBATCH --open-mode=append
set -uo pipefail
: "${RUN_DIR:?set RUN_DIR to the directory of the run, on a file system that all hosts share}"
cd "$SLURM_SUBMIT_DIR" || exit 2
max_requeues=${MAX_REQUEUES:-50}

# A process that dies ends the others within --peer-timeout, with exit code 3, and the job is requeued and resumes. Exit
# codes 1 (an unexpected error) and 2 (a user's mistake) would come again. srun reports the highest code of all tasks, and
# a task that it kills has 137 or 143, so each task notes a code that must not be tried again in a file.
final=$RUN_DIR/.final-exit-code-$SLURM_JOB_ID
mkdir -p "$RUN_DIR" && rm -f "$final"
# shellcheck disable=SC2016
task='trap : TERM USR1; bash scripts/train.sh "$@"; code=$?; case $code in 1|2) echo $code >> "$0";; esac; exit $code'
mounts=${CONTAINER_MOUNTS:-$RUN_DIR:$RUN_DIR}
case ${CONTAINER:-} in
'') start=() ;;
*.sif) start=(apptainer exec --nv --bind "$mounts" --pwd /opt/megajax "$CONTAINER") ;;
*) start=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir=/opt/megajax) ;;
esac
code=0
srun --kill-on-bad-exit=1 "${start[@]}" bash -c "$task" "$final" "$@" || code=$?
if [[ -s $final ]]; then
    code=$(sort -n "$final" | tail -1)
    rm -f "$final"
fi

if ((code == 0)); then
    exit 0
elif ((code != 3 && code <= 128)) || ((code == 130)); then
    echo "a process ended with exit code $code, see $RUN_DIR/logs; the job is not requeued: a new start would end the same way"
    exit "$code"
elif ((${SLURM_RESTART_COUNT:-0} >= max_requeues)); then
    echo "a process ended with exit code $code, see $RUN_DIR/logs; the job is not requeued: it was $max_requeues times already"
    exit "$code"
fi
echo "a process ended with exit code $code, see $RUN_DIR/logs; the job is requeued"
scontrol requeue "$SLURM_JOB_ID"

#!/usr/bin/env bash
# sbatch --export=ALL,RUN_DIR=/shared/runs/175b scripts/slurm.sh --model gpt3-175b --tensor 8 --pipe 8 --chunks 3 \
#     --tokenizer gpt2 --text /shared/corpus.jsonl.gz
# Eight hosts of eight GPUs, one process per GPU. For one process per host, pass --ntasks-per-node=1: jax then gives each
# process all GPUs of its host.
#SBATCH --job-name=megajax
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300   # five minutes before the end: save a checkpoint, exit 0
#SBATCH --requeue           # after a host failure
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# A process that dies ends the others within --peer-timeout, with exit code 3. The job is then requeued and resumes.
if srun --kill-on-bad-exit=1 bash scripts/train.sh "$@"; then
    exit 0
fi
echo "a process failed, see $RUN_DIR/logs; the job is requeued"
scontrol requeue "$SLURM_JOB_ID"

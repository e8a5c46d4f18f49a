#!/usr/bin/env bash
# sbatch --array=0-63 scripts/slurm_preprocess.sh --input '/shared/web/*.jsonl.zst' --out /shared/corpus --tokenizer gpt2
# Each task of the array writes one shard. A task that failed: submit the same array again; complete shards are not made
# again. When all are complete: megajax preprocess merge --shards /shared/corpus
#SBATCH --job-name=preprocess
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue           # after a host failure
#SBATCH --open-mode=append
set -euo pipefail
shard=$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT
exec python -m megajax.data.preprocess "$@" --workers "${SLURM_CPUS_PER_TASK:-1}" --shard "$shard"

#!/usr/bin/env bash
# Four machines with 8 GPUs:  sbatch scripts/slurm/many_nodes.sh configs/model/clip-b-32.yaml run=...
# Another number:  sbatch --nodes=16 scripts/slurm/many_nodes.sh ...
# Two minutes before the time limit the run saves and queues up again. Put your account, partition
# and the numbers of your machines below. Precision is bf16, or ACCELERATE_MIXED_PRECISION=no; to
# shard, export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 before.
#SBATCH --job-name=multimodal
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
source scripts/slurm/requeue.sh

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Jobs that share a machine must not share a port.
port=$((20000 + SLURM_JOB_ID % 10000))

requeueing srun --kill-on-bad-exit=1 \
  torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:$port" \
  scripts/train.py "$@"

#!/usr/bin/env bash
# One machine, all its GPUs:  sbatch scripts/slurm/one_node.sh configs/model/clip-b-32.yaml run=...
# Two minutes before the time limit the run saves and queues up again. Put your account, partition
# and the numbers of your machines below. Precision is bf16, or ACCELERATE_MIXED_PRECISION=no; to
# shard, export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 before.
#SBATCH --job-name=multimodal
#SBATCH --nodes=1
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

requeueing srun --kill-on-bad-exit=1 \
  torchrun --standalone --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" scripts/train.py "$@"

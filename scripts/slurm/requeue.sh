# Sourced by the job scripts.
# shellcheck shell=bash

# torchrun dies of a SIGUSR1 that it was not told of.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export ACCELERATE_MIXED_PRECISION=${ACCELERATE_MIXED_PRECISION:-bf16}
# srun does not take it over from sbatch by itself.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# The project's own environment, unless another one is active.
if ! command -v torchrun > /dev/null && [ -f .venv/bin/activate ]; then
  source .venv/bin/activate
fi

# requeueing COMMAND...: run it; when SLURM announces the time limit (SIGUSR1), let it save, and
# queue the job up again. The same command then goes on.
requeueing() {
  local asked="" code=0 child
  "$@" &
  child=$!
  trap 'asked=yes; kill -USR1 "$child" 2>/dev/null || true' USR1
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal has ended the wait, not the command
    code=0
    wait "$child" || code=$?
  done
  if [ -n "$asked" ] && [ "$code" -ne 0 ]; then
    echo "time limit: saved, and queued up again"
    scontrol requeue "$SLURM_JOB_ID"
    return 0
  fi
  return "$code"
}

#!/usr/bin/env bash
# Fresh machine to green tests. `--slow` adds the slow tests; other arguments go to pytest.
source "$(dirname "$0")/environment.sh" dev

export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 WANDB_SILENT=true
arguments=()
for argument in "$@"; do
  if [ "$argument" = "--slow" ]; then
    arguments+=(-m "not gpu and not network")
  else
    arguments+=("$argument")
  fi
done

ruff check .
ruff format --check .
pyright
pytest --numprocesses=2 "${arguments[@]+"${arguments[@]}"}"

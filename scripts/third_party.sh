#!/usr/bin/env bash
# Do the programs of others read our exports and compute what we compute? A table, and exit code 1
# when one does not. Needs a network once, for three environments in .venv-clients (3 GB).
# Usage: scripts/third_party.sh [--run runs/quickstart] [--data data/openmoji/concepts] ...
source "$(dirname "$0")/environment.sh" dev

python scripts/clients/run.py "$@"

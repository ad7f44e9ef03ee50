#!/usr/bin/env bash
# Kills training runs at random moments, resumes them, and compares their results with those of undisturbed runs.
#
#   bash tests/chaos.sh 40           40 kills, over one rank, two ranks, a whole model, and sampling ahead
#   bash tests/chaos.sh 40 7         the same with another seed for the moments
#   bash tests/chaos.sh 100 0 bench/results/chaos.json    also writes the counts of each kind of run
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "$*" =~ ^[1-9][0-9]*( [0-9]+)?( .+)?$ ]] || { sed -n 's/^# //p' "tests/$(basename "$0")" >&2; exit 2; }
export OMP_NUM_THREADS=1
exec "${OCTET_PYTHON:-python}" -m tests.e2e.chaos "$@"

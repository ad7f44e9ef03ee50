#!/usr/bin/env bash
# Lets every two values of two features meet in a run of three steps, kills each run once, resumes it, and compares.
#
#   bash tests/pairs.sh pairs.json         all runs, half an hour or more; the same command goes on where it stopped
#   bash tests/pairs.sh pairs.json 7       those of another seed
#   bash tests/pairs.sh pairs.json 7 5     five of them
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "$*" =~ ^[^[:space:]]+( [0-9]+){0,2}$ ]] || { sed -n 's/^# //p' "tests/$(basename "$0")" >&2; exit 2; }
export OMP_NUM_THREADS=1
exec "${OCTET_PYTHON:-python}" -m tests.e2e.pairs "$@"

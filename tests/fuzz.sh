#!/usr/bin/env bash
# Gives Octet broken input of every kind that it reads, and counts what is no short message.
#
#   bash tests/fuzz.sh 100000         100,000 inputs; from so many on, the counts are written to bench/results/fuzz.json
#   bash tests/fuzz.sh 3000 7         3,000 others, of another seed
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "$*" =~ ^[1-9][0-9]*( [0-9]+)?( .+)?$ ]] || { sed -n 's/^# //p' "tests/$(basename "$0")" >&2; exit 2; }
export OMP_NUM_THREADS=1
exec "${OCTET_PYTHON:-python}" -m tests.e2e.fuzz "$@"

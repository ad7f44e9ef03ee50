#!/usr/bin/env bash
# Kills training runs at random moments, resumes them, and compares their results with those of undisturbed runs.
#
#   bash tests/chaos.sh 40           40 kills, over one rank, two ranks, and training of the whole model
#   bash tests/chaos.sh 40 7         the same with another seed for the moments
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
exec "${OCTET_PYTHON:-python}" -m tests.e2e.chaos "$@"

#!/usr/bin/env bash
# Run Python over the stub of a card, in the environment of the CUDA tests:
#
#   tests/cuda/python.sh train.py --preset nano
#   CUDA_STUB_MEMORY_GIB=6 CUDA_STUB_CAPABILITY=7.5 tests/cuda/python.sh -m trainer.commands.main doctor
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$root/scripts/environment.sh"
source "$root/tests/cuda/environment.sh"
use_environment "$root" dev
use_cuda_environment "$root"
exec python "$@"

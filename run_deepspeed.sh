#!/usr/bin/env bash
# One command: makes the environment if there is none, picks the preset for this hardware, trains.
#
#   ./run_deepspeed.sh                                      the hardware chooses
#   ./run_deepspeed.sh --preset 8gb algorithm.lr=2e-5       your settings go through to octet train
#   ./run_deepspeed.sh --dry-run                            print the settings and stop
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # `sh run_deepspeed.sh`
set -euo pipefail
root="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$root/scripts/environment.sh"
use_environment "$root"
exec "${OCTET_PYTHON:-python}" -c "$octet" train "$@"

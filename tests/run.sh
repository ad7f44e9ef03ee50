#!/usr/bin/env bash
# The one test command: makes the same environment as run_deepspeed.sh, with the development tools, and runs the tests.
#
#   bash tests/run.sh                 the default tier, minutes on two quiet cores
#   bash tests/run.sh slow            minutes: learning, the shipped default to its end
#   bash tests/run.sh gpu             needs a CUDA device
#   bash tests/run.sh cuda            torch's CUDA build over a stub of a card, in an environment of its own that is
#                                     made here; see tests/cuda/README.md
#   bash tests/run.sh vllm            a real vLLM on the CPU, in an environment of its own that is made here, or that of
#                                     OCTET_VLLM_PYTHON
#   bash tests/run.sh llama           a real llama.cpp, which is built here (2 minutes on two cores, once), and
#                                     lm-evaluation-harness; or both from the folder OCTET_LLAMA
#   bash tests/run.sh slurm           jobs in a Slurm that the tests start (Debian, root); installs it
#   bash tests/run.sh all             all but vllm, cuda and llama
#   bash tests/run.sh -k losses -x    anything else goes to pytest
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/environment.sh"
if [ "${1:-}" = vllm ] && [ -z "${OCTET_VLLM_PYTHON:-}" ]; then
    source "$root/tests/vllm/environment.sh"
    use_vllm_environment "$root" || { echo "SKIPPED: the tests against the real vLLM" && exit 0; }
else
    use_environment "$root" dev
fi
if [ "${1:-}" = llama ]; then
    source "$root/tests/llama/environment.sh"
    use_llama "$root" || { echo "SKIPPED: the tests against the real llama.cpp" && exit 0; }
fi
if [ "${1:-}" = cuda ]; then
    source "$root/tests/cuda/environment.sh"
    use_cuda_environment "$root" || { echo "SKIPPED: the tests over a stub of a card" && exit 0; }
fi
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the test models are too small to share between threads
workers=$(($(env -u OMP_NUM_THREADS nproc) + 1)) # nproc counts OMP_NUM_THREADS; some tests wait, for a server or a timeout
side_by_side=(-n "$workers" --maxprocesses 4 --dist loadfile --no-loadscope-reorder) # in the order of tests/conftest.py
side_by_side+=(--max-worker-restart 0) # a worker that a hanging test has ended would run that test again
with_cuda_tests=(tests/cuda tests/test_gpu.py tests/test_bench.py)
# To collect the tests of all files takes longer than many tiers' own work, so their files are named.
mapfile -t of_tier < <(grep -rl "mark\.${1:-none}\b" tests --include="test_*.py")
case "${1:-}" in
slow) exec python -m pytest "${side_by_side[@]}" -m "$@" "${of_tier[@]}" ;;
cuda) shift && exec python -m pytest -n 2 --dist worksteal -m cuda "${with_cuda_tests[@]}" "$@" ;;
gpu | slurm | llama) exec python -m pytest -m "$@" "${of_tier[@]}" ;;
vllm) shift && exec python -m pytest -m vllm tests/vllm "$@" ;;
all) shift && exec python -m pytest -m "not vllm and not cuda and not llama" "$@" ;;
*) exec python -m pytest "${side_by_side[@]}" -m "not slow and not gpu and not cuda and not vllm and not slurm and not llama" "$@" ;;
esac

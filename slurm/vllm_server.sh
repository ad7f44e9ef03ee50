#!/usr/bin/env bash
# vllm_server.sh MODEL FIRST_PORT MODULES OPTION...: start a vLLM server, as a task of vllm.sbatch, on one of its GPUs.
# MODULES is a folder with vllm_key_check.py, which asks for the key VLLM_API_KEY on every route.
# OCTET_VLLM_PYTHON is a python with vLLM; the default is Octet's own.
#
# The server listens only on the address of the node, because its connections are not encrypted.
set -euo pipefail
trap '' USR1 # Slurm sends it to every step, and it would kill the server, which the run needs until its last step is done
IFS=, read -r -a devices <<<"${CUDA_VISIBLE_DEVICES:-}"
[ "${#devices[@]}" -lt 2 ] || export CUDA_VISIBLE_DEVICES="${devices[SLURM_LOCALID]}"
export VLLM_API_KEY="${VLLM_API_KEY:?vllm.sbatch makes it, and srun has not passed it on}" PYTHONPATH="$3"
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1
read -r -a more <<<"${OCTET_VLLM_ARGUMENTS:-}"
exec "${OCTET_VLLM_PYTHON:-${OCTET_PYTHON:-python}}" -m vllm.entrypoints.openai.api_server \
    --model "$1" --served-model-name base --host "$SLURMD_NODENAME" --port "$(($2 + SLURM_LOCALID))" \
    --enable-lora --max-loras 4 --max-lora-rank 64 --logprobs-mode processed_logprobs --generation-config vllm \
    --middleware vllm_key_check.KeyCheck "${@:4}" ${more[@]+"${more[@]}"}

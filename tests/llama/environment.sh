# shellcheck shell=bash
# Sourced, not run: use_llama ROOT puts the programs of other people that run or measure an exported model on the
# PYTHONPATH: a real llama.cpp, as the package llama-cpp-python, and lm-evaluation-harness; status 3, and why, where they
# cannot be had. There are no wheels of llama.cpp: it is compiled once, for 4 minutes of one core (18 with all
# optimisations), into ROOT/.venv-llama. OCTET_LLAMA names a folder that has both.

use_llama() {
    local here="$1/tests/llama" home="${OCTET_LLAMA:-$1/.venv-llama}" wanted
    wanted="$(cat "$here/requirements.txt" "$here/library.cmake" "$here/environment.sh" | cksum)"
    if [ -z "${OCTET_LLAMA:-}" ] && [ "$(cat "$home/.octet-installed" 2>/dev/null)" != "$wanted" ]; then
        echo "octet: building llama.cpp in $home (2 minutes on two cores)"
        CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O0 -DCMAKE_C_FLAGS_RELEASE=-O2 '-DCMAKE_PROJECT_llama_cpp_INCLUDE=$here/library.cmake'" \
            nice python3 -m pip install --quiet --upgrade --no-deps --target "$home" -r "$here/requirements.txt" ||
            { echo "octet: no llama.cpp here: it needs a C++ compiler; the message is above." >&2 && return 3; }
        echo "$wanted" >"$home/.octet-installed"
    fi
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$home"
}

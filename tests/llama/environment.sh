# shellcheck shell=bash
# Sourced, not run: use_llama ROOT puts a real llama.cpp on the PYTHONPATH, as the package llama-cpp-python; status 3, and
# why, where it cannot be built. There are no wheels of it: it is compiled once, for 7 minutes of one core (18 with all
# optimisations), into ROOT/.venv-llama. OCTET_LLAMA names a folder that has it.

LLAMA=llama-cpp-python==0.3.36

use_llama() {
    local home="${OCTET_LLAMA:-$1/.venv-llama}"
    if [ -z "${OCTET_LLAMA:-}" ] && [ "$(cat "$home/.octet-installed" 2>/dev/null)" != "$LLAMA" ]; then
        echo "octet: building $LLAMA in $home (4 minutes on two cores)"
        CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DCMAKE_C_FLAGS_RELEASE=-O2" nice python3 -m pip install --quiet --upgrade --no-deps --target "$home" "$LLAMA" diskcache ||
            { echo "octet: no llama.cpp here: it needs a C++ compiler; the message is above." >&2 && return 3; }
        echo "$LLAMA" >"$home/.octet-installed"
    fi
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$home"
}

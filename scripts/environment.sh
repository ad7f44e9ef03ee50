# shellcheck shell=bash
# Sourced, not run: use_environment ROOT [EXTRA] leaves a `python` on the PATH that has Octet and its dependencies.
# An active virtual environment (or conda) is used as it is; without one it is ROOT/.venv. OCTET_PYTHON names a python
# that has everything, of a container or of a module: it is taken, and nothing is installed. constraints.txt is the lock
# file: exact versions of everything, for uv and for pip, whatever index they come from.

# Images of containers set this. Python would then compile all packages again in every command, which takes 6 seconds.
unset PYTHONDONTWRITEBYTECODE

# The command octet for `python -c`. With `python -m`, modules of the working folder would come first.
# shellcheck disable=SC2034
octet='import sys; sys.path[:] = filter(None, sys.path); from octet.__main__ import main; main()'

use_environment() {
    local root="$1" extra="${2:-}"
    if [ -n "${OCTET_PYTHON:-}" ]; then
        case "$OCTET_PYTHON" in */*) PATH="$(dirname "$OCTET_PYTHON"):$PATH" ;; esac # others are on the PATH already
        export PATH PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    _wait_for_others "$root"
    if [ ! -x "${VIRTUAL_ENV:-${CONDA_PREFIX:-/nowhere}}/bin/python" ]; then
        _can_be_used "$root/.venv/bin/python" || _make_environment "$root/.venv"
        export VIRTUAL_ENV="$root/.venv"
    fi
    # first, because the modules that a job has loaded may have a python, too
    export PATH="${VIRTUAL_ENV:-$CONDA_PREFIX}/bin:$PATH" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    _install_once "$root" "$extra"
    exec 9>&- # lets the next one in
}

# The jobs of a sweep start together on a fresh clone: one installs. Without flock, or in a place that cannot be
# written, each is on its own.
_wait_for_others() {
    command -v flock >/dev/null && { exec 9>"$1/.octet-lock"; } 2>/dev/null || return 0
    flock 9 || echo "octet: no locks in $1; do not start two jobs at once while nothing is installed" >&2
}

# A new version of the system's Python finds no packages in an environment of the old one, not even pip.
_can_be_used() {
    _has "$1" deepspeed || _has "$1" pip || { command -v uv >/dev/null && [ -x "$1" ]; }
}

_has() {
    "$1" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$2') is None)" 2>/dev/null
}

_make_environment() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "octet: making $1 with $("$candidate" --version)"
            "$candidate" -m venv --clear "$1" && return
            rm -rf "$1" # without the package python3-venv it has a python and no pip
        fi
    done
    echo "octet: $1 could not be made. Python 3.10 or newer is needed, with its venv module: module load python/3.11 on a" \
        "cluster ('module avail python' lists them), apt install python3-venv on a Debian of your own. If the message" \
        "above is of the disk, clone into a folder that can be written, with several GB free." >&2
    exit 2
}

# Installs when setup.cfg or constraints.txt have changed since the last time, or the packages are gone.
_install_once() {
    local root="$1" extra="$2" stamp wanted
    stamp="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}/.octet-installed"
    wanted="$(cat "$root/setup.cfg" "$root/constraints.txt" | cksum)"
    [ "$(cat "$stamp${extra:+-$extra}" 2>/dev/null)" = "$wanted" ] && _has python deepspeed && return
    echo "octet: installing dependencies (a minute or two the first time)"
    # torch first: DeepSpeed looks for it while it is built, and in an isolated build it would be downloaded again
    _pip -c "$root/constraints.txt" torch numpy setuptools wheel ninja packaging
    _pip -c "$root/constraints.txt" --no-build-isolation deepspeed
    _pip -c "$root/constraints.txt" --no-build-isolation -e "$root${extra:+[$extra]}"
    echo "$wanted" | tee "$stamp" >"$stamp${extra:+-$extra}"
}

# OCTET_WHEELS is the `wheels` folder of `octet fetch`: with it nothing is asked of the internet. Python compiles what it
# imports at the first start, which is a small part of what the installer would compile.
_pip() {
    local offline=() installer=(python -m pip install --disable-pip-version-check --no-compile) log
    [ -z "${OCTET_WHEELS:-}" ] || offline=(--no-index --find-links "$OCTET_WHEELS")
    ! _has_uv || installer=(uv pip install --python "$(command -v python)")
    log="$(mktemp)"
    if ! (set -o pipefail && "${installer[@]}" ${offline[@]+"${offline[@]}"} "$@" 2>&1 | tee "$log" | _show_progress); then
        grep -v '^WARNING' "$log" | tail -n 20 >&2
        echo "octet: pip could not install the dependencies; its message is above." >&2
        exit 2
    fi
    rm -f "$log"
}

# Shows what is downloaded and installed: in one line that changes on a terminal, elsewhere in a line for each file of
# 10 MB or more.
_show_progress() {
    local line
    while read -r line; do
        case "$line" in
        Downloading* | Installing* | Building*)
            if [ -t 1 ]; then
                printf '\r\033[K%.78s' "$line"
            elif [[ "$line" != Downloading* || "$line" =~ \([0-9]{2,}[0-9.]*\ ?Mi?B|Gi?B\) ]]; then
                printf '%.100s\n' "$line"
            fi
            ;;
        esac
    done
    [ ! -t 1 ] || printf '\r\033[K'
}

# uv installs in a fraction of the time. It does not read pip's settings: where they name an index or a folder of
# wheels, pip is the one that finds the packages there. A pipe to `grep -q` would not do: grep ends at its first match, and
# pip then fails to write.
_has_uv() {
    command -v uv >/dev/null && ! grep -qE '(index-url|find-links|no-index|proxy|cert)=' <<<"$(python -m pip config list)"
}

#!/usr/bin/env bash
# All set-up of a checkout on a bare Debian or Ubuntu: system packages, a virtual environment,
# torch, the package itself. `make setup` calls it; safe to run again at any time.
# `tools/setup.sh packages` stops after the system packages: sudo where a checkout is a user's.
#
#   VENV        folder of the virtual environment      (default .venv)
#   PYTHON      interpreter that makes it              (default: the first Python 3.11 to 3.13 found)
#   TORCH_SPEC  what pip installs as torch             (default torch==2.13.0)
#   EXTRAS      extras of the package                  (default trainers,dev,notebook)
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}
EXTRAS=${EXTRAS:-trainers,dev,notebook}
STAMP="$VENV/.vla-gym-setup"

say() { printf '[setup] %s\n' "$*" >&2; }
die() { printf '[setup] ERROR: %s\n' "$*" >&2; exit 1; }

has_library() { ldconfig -p 2>/dev/null | grep -q "$1" || [ -n "$(find /usr/lib /usr/local/lib -name "$1*" -print -quit 2>/dev/null)" ]; }

# Rendering without a screen needs EGL and Mesa's software driver; OpenCV (a dependency of
# robosuite) needs libGL and GLib.
missing_packages() {
    has_library libEGL.so.1 || echo libegl1
    if ! has_library libEGL_nvidia.so.0; then
        [ -n "$(find /usr/lib /usr/local/lib \( -name 'swrast_dri.so' -o -name 'libgallium*' \) -print -quit 2>/dev/null)" ] || echo libgl1-mesa-dri
    fi
    has_library libGL.so.1 || echo libgl1
    has_library libgthread-2.0.so.0 || echo libglib2.0-0
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

python_packages() {
    local python=$1
    if [ -z "$python" ]; then echo python3 python3-venv; return; fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
}

install_packages() {
    local packages=("$@")
    [ ${#packages[@]} -eq 0 ] && return
    if ! command -v apt-get >/dev/null; then
        die "These Debian packages (or your system's equivalents) are missing: ${packages[*]}. Install them, then run this again."
    elif [ "$(id -u)" -ne 0 ]; then
        die "System packages are missing and this user may not install them. Run once: sudo apt-get install -y ${packages[*]}"
    fi
    say "installing system packages: ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null 2>&1 && return
    apt-get update -q >/dev/null
    apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null
}

mapfile -t needed < <( { missing_packages; python_packages "$(find_python)"; } | tr ' ' '\n')
install_packages "${needed[@]}"
if [ "${1:-}" = packages ]; then exit 0; fi

python=$(find_python)
[ -n "$python" ] || die "Python 3.11, 3.12 or 3.13 is needed (mujoco 3.3 has no wheels for later ones); none was found. Install one or call: make PYTHON=/path/to/python"

# The stamp holds what the environment was made from, so that a changed pyproject installs again.
want=$( (cat pyproject.toml tools/setup.sh; echo "$EXTRAS") | sha256sum | cut -c1-16)-$(pwd | sha256sum | cut -c1-8)
if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$want" ]; then exit 0; fi

if [ ! -x "$VENV/bin/python" ]; then
    say "creating $VENV with $python"
    "$python" -m venv "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
say "installing $TORCH_SPEC"
pip install -q "$TORCH_SPEC"
say "installing vla-gym[$EXTRAS] (a few minutes the first time)"
pip install -q -e ".[$EXTRAS]"
"$VENV/bin/python" -c 'import vla_gym' || die "The installed package cannot be imported; see the message above."
printf '%s\n' "$want" >"$STAMP"
say "done: $VENV"

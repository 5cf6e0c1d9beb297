#!/usr/bin/env bash
# Environments with the RL libraries of docs/libraries.md, every version pinned, and a command in each.
#
#   tools/libraries.sh python -m pytest tests/libraries
#
#   VENV        environment whose Python makes them  (default .venv, see tools/setup.sh)
#   LIBRARIES   folder of the environments           (default .venv-libraries)
#   TORCH_SPEC  what pip installs as torch           (default torch==2.13.0)
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
LIBRARIES=${LIBRARIES:-.venv-libraries}
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}

say() { printf '[libraries] %s\n' "$*" >&2; }

# LeRobot 0.4 pins other versions of torch and huggingface_hub than vla_gym: each is installed without
# what it asks for, and what both of them need of it comes from one list.
prepare_lerobot() {
    local venv=$LIBRARIES/lerobot constraints=tools/libraries/requirements-lerobot.txt stamp want
    stamp=$venv/.libraries-setup
    want=$(cat "$constraints" tools/libraries.sh | sha256sum | cut -c1-16)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then return; fi
    "$VENV/bin/python" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q)
    say "installing into $venv: $TORCH_SPEC, vla-gym, lerobot (some minutes)"
    "${pip[@]}" "$TORCH_SPEC"
    "${pip[@]}" -r "$constraints"
    "${pip[@]}" --no-deps -e . lerobot==0.4.4 torchvision==0.28.0 ||
        say "lerobot cannot be installed here; its tests are skipped"
    printf '%s\n' "$want" >"$stamp"
}

# Environment, constraints, libraries. RLlib pins a Gymnasium of its own.
prepare() {
    local venv=$LIBRARIES/$1 constraints=$2 stamp want
    shift 2
    stamp=$venv/.libraries-setup
    want=$(cat "$constraints" pyproject.toml tools/libraries.sh | sha256sum | cut -c1-16)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then return; fi
    "$VENV/bin/python" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q -c "$constraints")
    say "installing into $venv: $TORCH_SPEC, vla-gym, $* (some minutes)"
    "${pip[@]}" "$TORCH_SPEC"
    "${pip[@]}" -e '.[trainers,dev]'
    local library
    for library in "$@"; do
        "${pip[@]}" "$library" || say "$library cannot be installed here; its tests are skipped"
    done
    printf '%s\n' "$want" >"$stamp"
}

prepare most tools/libraries/constraints.txt sb3-contrib sbx-rl torchrl skrl tianshou
prepare rllib tools/libraries/constraints-rllib.txt 'ray[rllib]'
prepare_lerobot

status=0
for name in most rllib lerobot; do
    say "$name: $*"
    PATH="$PWD/$LIBRARIES/$name/bin:$PATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$@" || status=$?
done
exit "$status"

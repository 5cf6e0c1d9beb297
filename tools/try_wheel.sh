#!/usr/bin/env bash
# Try a wheel as a new user has it: an environment of its own, an empty folder, an empty home.
#
#   tools/try_wheel.sh dist/vla_gym-*.whl
#
#   PYTHON      interpreter that makes the environment  (default python3)
#   TORCH_SPEC  what pip installs as torch              (default torch==2.13.0)
set -euo pipefail
wheel=$(realpath "$1")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/home" "$scratch/empty"
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install -q "${TORCH_SPEC:-torch==2.13.0}"
"$scratch/venv/bin/pip" install -q "$wheel"

cd "$scratch/empty"
try() { printf '\n$ %s\n' "$*" >&2; env -i HOME="$scratch/home" PATH="$scratch/venv/bin:/usr/bin:/bin" "$@"; }
try vla-gym --help
try vla-gym-train --help
try vla-gym doctor
try python -c '
import gymnasium, vla_gym

env = gymnasium.make("vla_gym:LiberoVLA-goal-v0", task_ids=8)
observation, info = env.reset(seed=0)
observation, *_, info = env.step(observation["vla_action"])
assert info["elapsed_steps"] == 8, info
env.close()
print(vla_gym.__file__, info["instruction"])
'
[ -z "$(ls)" ] || { echo "left behind in the working folder: $(ls)" >&2; exit 1; }

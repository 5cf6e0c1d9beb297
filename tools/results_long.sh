#!/usr/bin/env bash
# libero_10, ten tasks of two parts each that no shipped VLA knows: five demonstrations a task by the scripted experts,
# mini trained on with them, then tools/results_suite.sh on that VLA, with the same demonstrations in the replay and 20
# official states a task. An hour and a quarter of two cores with these 45 minutes of TD3+BC.
#   tools/results_long.sh 0 --max-minutes 45
# DEMOS: folder of the demonstrations in the replay; empty: none.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${1:?Expected the seed of TD3+BC, then options of vla-gym-train td3.}"
runs=${RUNS:-runs}/long bin=${VENV:-.venv}/bin
"$bin/vla-gym" demos --suite 10 --num-demos 5 --assets libero --output "$runs/clone-demos"
[ -f "$runs/mini/card.json" ] || "$bin/vla-gym-train" mini --preset mini_few --init-from mini --demos "$runs/clone-demos" --demos-per-task 5 \
    --held-out-episodes 0 --eval-episodes 0 --run-dir "$runs/mini" --auto-resume
demos=${DEMOS-$runs/clone-demos}
GROUP=long VLA=$runs/mini/model DEMOS=$demos STATES=${STATES:-20} exec tools/results_suite.sh 10 "$1" ${demos:+--bc-beside-demos 0.5} "${@:2}"

#!/bin/sh
# Make one row of "Collecting and learning" of docs/results.md, on two cores with nothing else running.
#   tools/results_modes.sh in-turn|pipelined|at-once SEED
set -eu
case $1 in
in-turn) mode="--no-pipelined" ;;
pipelined) mode="--pipelined" ;;
at-once) mode="--no-pipelined --asynchronous" ;;
*) echo "expected in-turn, pipelined or at-once, got $1" >&2 && exit 2 ;;
esac
run=${RUNS:-runs}/modes/$1-$2
mkdir -p "${run%/*}"
# shellcheck disable=SC2086  # one word an option
vla-gym-train td3 --preset td3_single --stride 0 --suite goal --task-ids 5 --num-envs 8 --workers 2 $mode --seed "$2" \
    --run-dir "$run" --no-progress
python "$(dirname "$0")/make_results_page.py" --add-mode "$1-$2" "$run"

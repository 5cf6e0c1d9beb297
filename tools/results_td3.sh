#!/bin/sh
# Make one row of docs/results.md: train, evaluate on the official states beside the VLA, keep the cards.
#   tools/results_td3.sh single/goal5-s0 td3_single goal 5 --seed 0
#   tools/results_td3.sh suite/goal-s0 td3_suite goal "0 1 2 3 4 5 6 7 8 9" --seed 0
# Run again after a stop, it goes on with the same run. RUNS: where runs are kept (default: runs).
set -eu
place=$1 preset=$2 suite=$3 tasks=$4
shift 4
runs=${RUNS:-runs}
run=$runs/$place
mkdir -p "$runs"
if [ ! -f "$run/card.json" ]; then
    if [ -f "$run/config.json" ]; then
        vla-gym-train td3 --resume "$run" --no-progress
    else
        # shellcheck disable=SC2086  # one word a task
        vla-gym-train td3 --preset "$preset" --suite "$suite" --task-ids $tasks --run-dir "$run" --no-progress "$@"
    fi
fi
evaluate() { # OUT OPTIONS...
    out=$1
    shift
    "$(dirname "$0")/resumable_eval.sh" "$out" --suite "$suite" "$@"
}
[ -f "$runs/vla/$suite/card.json" ] || evaluate "$runs/vla/$suite" --vla mini-few
# shellcheck disable=SC2086
evaluate "$run/eval" --policy "$run" --task-ids $tasks --paired "$runs/vla/$suite"
python "$(dirname "$0")/make_results_page.py" --add "$place" "$run" "$run/eval"

#!/bin/sh
# Make one row of docs/results.md: train with PPO or GRPO, evaluate on the official states beside the start.
#   tools/results_on_policy.sh grpo-s0 grpo grpo_goal goal --seed 0
# Run again after a stop, it goes on with the same run. RUNS: where runs are kept (default: runs).
set -eu
name=$1 algorithm=$2 preset=$3 suite=$4
shift 4
runs=${RUNS:-runs}
run=$runs/on_policy/$name start=$runs/vla-token/$suite
mkdir -p "$runs"
if [ ! -f "$run/card.json" ]; then
    if [ -f "$run/config.json" ]; then
        vla-gym-train "$algorithm" --resume "$run" --no-progress
    else
        vla-gym-train "$algorithm" --preset "$preset" --suite "$suite" --run-dir "$run" --eval-states 0 --no-progress "$@"
    fi
fi
evaluate() { # OUT OPTIONS...
    out=$1
    shift
    "$(dirname "$0")/resumable_eval.sh" "$out" --suite "$suite" --head token "$@"
}
[ -f "$start/card.json" ] || evaluate "$start" --vla mini-few
evaluate "$run/eval" --vla "$run/vla" --paired "$start"
python "$(dirname "$0")/make_results_page.py" --add "on_policy/$name" "$run" "$run/eval"

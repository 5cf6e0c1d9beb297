#!/usr/bin/env bash
# One run of docs/results.md on LIBERO's own assets: TD3+BC on a whole suite, then VLA and policy on the 50
# official states of each task, and their cards into results/libero/. About two hours of two cores.
#   tools/results_suite.sh goal 0
#   tools/results_suite.sh goal 0 --no-use-rl-token      further options of vla-gym-train td3
# RUNS: folder of the runs (default runs). A run that was stopped goes on; so does an evaluation.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=$1 seed=$2
shift 2
runs=${RUNS:-runs} bin=${VENV:-.venv}/bin
name=$suite-s$seed$(printf '%s' "$@" | tr -c '[:alnum:]\n.' '-' | sed 's/--*/-/g')
run=$runs/libero/$name vla=$runs/libero/vla-$suite
"$bin/vla-gym-train" td3 --preset td3_libero --suite "$suite" --seed "$seed" --run-dir "$run" --auto-resume "$@"
evaluate() {
    local out=$1
    shift
    [ -f "$out/card.json" ] && return
    "$bin/vla-gym" eval --suite "$suite" --assets libero --out "$out" "$@" $([ -d "$out" ] && echo --resume)
}
evaluate "$vla" --vla mini-few
evaluate "$run/eval" --policy "$run" --paired "$vla/card.json"
"$bin/python" tools/make_results_page.py --add "libero/$name" "$run" "$run/eval"

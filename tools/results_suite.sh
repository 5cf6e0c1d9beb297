#!/usr/bin/env bash
# One run of docs/results.md on LIBERO's own assets: TD3+BC on a whole suite, then VLA and policy on the 50 official
# states of each task, and their cards into results/libero/. An hour and a half of two cores.
#   tools/results_suite.sh goal 0
#   TRAINER=grpo PRESET=grpo_gaussian VLA=mini-flow HEAD=l1 GROUP=libero_on_policy tools/results_suite.sh goal 4
#   GROUP=libero_token PAIRED=results/libero/goal-s0/eval.json tools/results_suite.sh goal 0 --no-use-rl-token
# Further options are the trainer's.
# RUNS: folder of the runs (default runs). A run that was stopped goes on; so does an evaluation.
# VLA: the frozen VLA (default mini-few). STATES: official states of each task that are evaluated (default 50).
# TRAINER, PRESET: what trains (default td3, td3_libero); a given TRAINER begins the run's name. A GROUP holds the runs of one VLA and HEAD: of the VLA alone (default: its own first choice).
# PAIRED: card of another evaluation of the same states that the policy is compared with, in place of the VLA's.
# GROUP: folder in RUNS, and of the cards in results/ (default libero, which is mini-few's: another VLA needs another).
# DEMOS: folder of demonstrations in td3's replay; empty: none (default: two of the task whose official states mini-few almost never solves, those that it was cloned from).
set -euo pipefail
cd "$(dirname "$0")/.."
suite=${1:?Expected a suite and a seed.} seed=${2:?Expected a seed.}
shift 2
group=${GROUP:-libero}
runs=${RUNS:-runs}/$group bin=${VENV:-.venv}/bin vla=${VLA:-mini-few}
name=${TRAINER:+$TRAINER-}$suite-s$seed$(printf '%s' "${@/#/-}" | tr -c '[:alnum:].' '-' | sed 's/--*/-/g')
trainer=${TRAINER:-td3} demos=${DEMOS:-}
if [ "$group" = libero ] && [ "$trainer-$vla" != td3-mini-few ]; then
    echo "GROUP libero holds td3's runs of mini-few: give $trainer of $vla a GROUP of its own." >&2
    exit 2
fi
case $trainer-$vla-$suite in td3-mini-few-goal) lost=3 ;; td3-mini-few-object) lost=2 ;; td3-mini-few-spatial) lost=9 ;; *) lost= ;; esac
if [ -n "${DEMOS+none}" ] && [ -z "$demos" ]; then
    name=$name${lost:+-no-demos}
elif [ -z "$demos" ] && [ -n "$lost" ]; then
    demos=$runs/demos
    "$bin/vla-gym" demos --suite "$suite" --task-ids "$lost" --num-demos 2 --assets libero --output "$demos"
fi
[ -z "$demos" ] || set -- --prior-demos "$demos" --demo-starts 0.5 "$@"
[ -f "$runs/$name/card.json" ] || "$bin/vla-gym-train" "$trainer" --preset "${PRESET:-td3_libero}" --suite "$suite" --vla "$vla" --seed "$seed" --run-dir "$runs/$name" --auto-resume "$@"
evaluate() {
    local out=$1
    shift
    [ -f "$out/card.json" ] && return
    "$bin/vla-gym" eval --suite "$suite" --assets libero --episodes "${STATES:-50}" --out "$out" "$@" $([ -d "$out" ] && echo --resume)
}
# Another number of states is another evaluation.
alone=$runs/vla-$suite${HEAD:+-$HEAD}${STATES:+-$STATES} trained=$runs/$name/eval${STATES:+-$STATES}
[ -n "${PAIRED:-}" ] || evaluate "$alone" --vla "$vla" ${HEAD:+--head "$HEAD"}
evaluate "$trained" --policy "$runs/$name" --paired "${PAIRED:-$alone/card.json}"
"$bin/python" tools/make_results_page.py --add "$group/$name" "$runs/$name" "$trained"

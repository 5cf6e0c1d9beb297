#!/bin/sh
# vla-gym eval into OUT, going on with an evaluation that was cut short:
#   tools/resumable_eval.sh OUT --suite goal --vla mini-few
set -eu
out=$1
shift
resume=""
[ -d "$out" ] && resume=--resume
exec vla-gym eval --out "$out" --no-progress $resume "$@"

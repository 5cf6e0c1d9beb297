#!/usr/bin/env bash
# Measure on one GPU what needs one (docs/gpu.md): under 9 minutes once the package is installed.
#
#   OUT     folder of the results                     (default ./gpu_check)
#   PYTHON  interpreter that has the package's needs  (default: tools/setup.sh makes .venv)
#
# Further arguments go to tools/gpu_check.py: e.g. --steps grpo td3, or --device cpu --tiny.
set -euo pipefail
out=$(realpath -m "${OUT:-gpu_check}")
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    bash tools/setup.sh
    PYTHON=${VENV:-.venv}/bin/python
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" tools/gpu_check.py --out "$out" "$@"

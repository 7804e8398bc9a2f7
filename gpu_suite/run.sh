#!/usr/bin/env bash
# The GPU tier with the packages that are there: nothing is installed. It takes torch, pytest, hypothesis, click, rich, jinja2 and numpy.
#   gpu_suite/run.sh          on the GPUs of this machine, within gpu_suite.plan.BUDGET_SECONDS; exit code 5 if there are none
#   gpu_suite/run.sh --cpu    with the device forced to the CPU
# Whatever follows goes to pytest: --gpu-tier tiny, --gpu-artifacts DIR, -k EXPRESSION, ...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

python=${PYTHON:-python3}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [[ ${1:-} == --cpu ]]; then
  shift
  exec "$python" -m pytest gpu_suite -q --gpu-device cpu "$@"
fi
limit=()
if command -v timeout >/dev/null; then # Ctrl-C once time is up: a case that hangs must not keep the table from being printed
  limit=(timeout --signal=INT --kill-after=10 "$("$python" -c 'from gpu_suite.plan import BUDGET_SECONDS; print(BUDGET_SECONDS)')")
fi
exec ${limit[@]+"${limit[@]}"} "$python" -m pytest gpu_suite -q --gpu-device cuda "$@"

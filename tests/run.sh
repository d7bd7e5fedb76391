#!/usr/bin/env bash
# Lint, formatting, import contracts, types, tests. Arguments go to pytest: tests/run.sh -m "not slow" tests/algorithm
#
# Without arguments the tests run in two processes: engines and layouts in one, and beside it what needs a single core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(launch/env.sh)
# one thread a process: tests start several, and more threads than cores make them crawl
export OMP_NUM_THREADS=1

echo "ruff check" && "$python" -m ruff check .
echo "ruff format" && "$python" -m ruff format --check .
echo "import contracts" && "${python%/*}/lint-imports" --no-logo
echo "mypy" && "$python" -m mypy
echo "pytest"
if (($#)); then
  exec "$python" -m pytest --durations=15 "$@"
fi

beside=(agents algorithm benchmarks bridge checkpoint observe pitfalls tools trainer)
log=$(mktemp)
"$python" -m pytest --durations=15 "${beside[@]/#/tests/}" >"$log" 2>&1 &
second=$!
trap 'kill "$second" 2>/dev/null || true; rm -f "$log"' EXIT

status=0
"$python" -m pytest --durations=15 "${beside[@]/#/--ignore=tests/}" || status=$?
wait "$second" || status=$?
echo "pytest, beside it"
cat "$log"
exit "$status"

#!/usr/bin/env bash
# Lint, formatting, types, tests. Arguments go to pytest: tests/run.sh -m "not slow" tests/algorithm
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(launch/env.sh)
# one thread a process: tests start several, and more threads than cores make them crawl
export OMP_NUM_THREADS=1

echo "ruff check" && "$python" -m ruff check .
echo "ruff format" && "$python" -m ruff format --check .
echo "mypy" && "$python" -m mypy
echo "pytest"
status=0
"$python" -m pytest --durations=15 "$@" || status=$?
exit "$status"

#!/usr/bin/env bash
# Lint, formatting, import contracts, types and tests, in three tiers. Arguments after the tier go to pytest.
#
#   tests/run.sh --fast      about 2 minutes: no engines, no trainer ranks, no whole runs
#   tests/run.sh             about 15 minutes: also engines, layouts and the main job
#   tests/run.sh --all       everything, as continuous integration runs it: a skipped test fails
#
# Without further arguments the tests run in two processes: engines and the main job in one, the rest beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tier=default
case "${1:-}" in
  --fast) tier=fast && shift ;;
  --all) tier=all && shift ;;
esac

# command:package; a tier below --all skips the tests that need a missing one
if [[ $tier == all ]]; then
  for needed in unshare:util-linux setpriv:util-linux mount:mount bwrap:bubblewrap; do
    command -v "${needed%%:*}" >/dev/null && continue
    echo "installing ${needed##*:}: ${needed%%:*} is missing"
    apt-get update -qq && apt-get install -qq -y "${needed##*:}" ||
      { echo "error: install the package ${needed##*:}; tests/run.sh --all needs ${needed%%:*}" >&2; exit 1; }
  done
fi

python=$(launch/env.sh)
# one thread a process: tests start several, and more threads than cores make them crawl
export OMP_NUM_THREADS=1

lint() {
  echo "ruff check" && "$python" -m ruff check . &&
    echo "ruff format" && "$python" -m ruff format --check . &&
    echo "import contracts" && "${python%/*}/lint-imports" --no-logo &&
    echo "mypy" && "$python" -m mypy
}

status=0
second=""
log=$(mktemp)
trap '[[ -z $second ]] || kill "$second" 2>/dev/null || true; rm -f "$log"' EXIT

case $tier in
  fast) tests=(-m "not slow") ;;
  default) tests=(-m "not exhaustive") ;;
  all) tests=(--no-skips) ;;
esac

if [[ $tier == fast ]]; then
  lint >"$log" 2>&1 &
  second=$!
  "$python" -m pytest -q --durations=5 "${tests[@]}" "$@" || status=$?
else
  lint
  tests+=(--durations=15)
  beside=()
  if (($# == 0)); then
    for folder in agents algorithm checkpoint convert data hf observe parallel pitfalls plan sandbox tools trainer weight_sync; do
      [[ ! -d tests/$folder ]] || beside+=("tests/$folder")
    done
    beside+=(tests/extending tests/test_doctor.py)
    "$python" -m pytest "${tests[@]}" "${beside[@]}" >"$log" 2>&1 &
    second=$!
  fi
  "$python" -m pytest "${tests[@]}" "${beside[@]/#/--ignore=}" "$@" || status=$?
fi

if [[ -n $second ]]; then
  wait "$second" || status=$?
  second=""
  cat "$log"
fi
exit "$status"

#!/usr/bin/env bash
# Checks everything: lint, format, types, import layers, tests. `--all` adds the slow tests; other flags go to pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit
purpose=test
if [[ " $* " == *" --all "* ]]; then purpose=all; fi
# shellcheck source=tools/setup.sh
source tools/setup.sh "$purpose"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

failed=()
part() {
  local name=$1 start=$SECONDS
  shift
  "$@" || failed+=("$name")
  echo "== $name: $((SECONDS - start)) s"
}
bin=$(dirname "$("$PYTHON" -c 'import sys; print(sys.executable)')")

# Types are checked beside all else: on a second core at first, then in the time that ranks wait for each other.
types=$(mktemp)
nice -n 19 "$PYTHON" -m mypy > "$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2> /dev/null; rm -f "$types"' EXIT

part "ruff check" "$PYTHON" -m ruff check .
part "ruff format" "$PYTHON" -m ruff format --check .
part "import layers" "$bin/lint-imports"
[ ${#failed[@]} -eq 0 ] || echo "== failed before the tests: ${failed[*]}"

start=$SECONDS
# Three files at a time, for two cores: most tests are ranks that wait for each other, and some wait for a clock.
# In the order of tests/conftest.py, which begins with the longest.
"$PYTHON" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"  # its closing line stays the last when all is well
code=$?
if [ "$code" -eq 2 ]; then
  kill "$mypy"                                     # by Ctrl-C, which does not reach what runs beside
else
  wait "$mypy" || { cat "$types"; failed+=(mypy); }
fi
trap 'rm -f "$types"' EXIT
if [ ${#failed[@]} -ne 0 ]; then
  echo "== failed beside pytest (code $code, $((SECONDS - start)) s): ${failed[*]}" >&2
  [ "$code" -ne 0 ] || code=1
fi
exit "$code"

#!/usr/bin/env bash
# Run all checks: lint, format, import layers, types and tests. `--all` adds the slow tests; other flags are passed to
# pytest.
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

# mypy runs in the background at low priority, because ranks in tests often wait for each other.
types=$(mktemp)
nice -n 19 "$PYTHON" -m mypy > "$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2> /dev/null; rm -f "$types"' EXIT

part "ruff check" "$PYTHON" -m ruff check .
part "ruff format" "$PYTHON" -m ruff format --check .
part "import layers" "$bin/lint-imports"
[ ${#failed[@]} -eq 0 ] || echo "== failed before the tests: ${failed[*]}"

start=$SECONDS
# Three files at a time on two cores, because most ranks wait for each other. tests/conftest.py orders the files, the
# longest first.
"$PYTHON" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"  # on success, pytest's summary is the last line
code=$?
if [ "$code" -eq 2 ]; then
  kill "$mypy"                                     # interrupted by Ctrl-C, which the background process does not receive
else
  wait "$mypy" || { cat "$types"; failed+=(mypy); }
fi
trap 'rm -f "$types"' EXIT
if [ ${#failed[@]} -ne 0 ]; then
  echo "== failed in addition to pytest (code $code, $((SECONDS - start)) s): ${failed[*]}" >&2
  [ "$code" -ne 0 ] || code=1
fi
exit "$code"

# shellcheck shell=bash
# Set PYTHON to a Python that has every package, and create .venv if necessary. The run scripts source this file with
# "run", "test" or "all". The base Python is $PYTHON if it is set, otherwise the first of python, python3, python3.14,
# ..., python3.11 that is 3.11 or newer.

find_python() {
  local candidate
  local names=(python python3 python3.14 python3.13 python3.12 python3.11)
  if [ -n "${PYTHON:-}" ]; then names=("$PYTHON"); fi
  for candidate in "${names[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
      printf '%s' "$candidate"
      return 0
    fi
  done
  echo "error: Python 3.11 or newer is needed, found $("${names[1]:-$PYTHON}" --version 2>&1 || true)." \
    "Install it, or select one: PYTHON=/path/to/python3.11 bash $0" >&2
  return 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$(find_python) || exit 1
PYTHON=$("$PYTHON" "$root/tools/set_up.py" "$1") || exit 1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

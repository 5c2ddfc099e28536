#!/usr/bin/env bash
# Test and benchmark the project on the GPU of this machine: `bash benchmarks/gpu/run.sh [--out DIR] [PART...]`.
# docs/accelerators.md describes the parts; `--help` lists the flags.
#
# For a machine without a network, run `bash benchmarks/gpu/run.sh wheels [--python 3.12] [--have FILE] [--out DIR]` on
# a machine with one. It collects the missing packages in .gpu-wheels (GPU_WHEELS names another folder). Copy that
# folder together with the repository: the first command installs the packages into a separate folder in PYTHONPATH.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
if [ "${1:-}" = wheels ]; then
  shift
  # shellcheck source=tools/setup.sh
  source tools/setup.sh run                       # sets PYTHON, whose tested package versions are collected
  exec "$PYTHON" -m benchmarks.gpu.wheels "$@"
fi
PYTHON=${PYTHON:-python3}
wheels=${GPU_WHEELS:-$root/.gpu-wheels}

is_complete() {
  "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' \
    deepspeed orjson zstandard
}
if compgen -G "$wheels/*.whl" > /dev/null && ! is_complete; then
  site=${GPU_SITE:-${TMPDIR:-/tmp}/megatron-gpu-site-$(id -u)}
  stamp=$("$PYTHON" --version; cat "$wheels"/*.whl | cksum; ls "$wheels")
  if [ "$stamp" != "$(cat "$site/.stamp" 2> /dev/null)" ]; then      # equal: an earlier start has installed these wheels
    if [ -e "$site/.stamp" ]; then rm -rf "$site"; fi                    # remove only a folder that this script has made
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || {
      echo "error: the wheels in $wheels are not for $("$PYTHON" --version) (see above). On a machine with a network:" \
        "bash benchmarks/gpu/run.sh wheels --python X.Y" >&2
      exit 1
    }
    printf '%s\n' "$stamp" > "$site/.stamp"
  fi
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m benchmarks.gpu "$@"

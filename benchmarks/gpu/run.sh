#!/usr/bin/env bash
# Proves and measures the project on the GPU of this machine: `bash benchmarks/gpu/run.sh [--out DIR] [PART...]`.
# Where this Python lacks packages and benchmarks/gpu/wheels.sh has gathered them, they are installed beside it, without
# a network. docs/accelerators.md says what each part does; `--help` lists the flags.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
PYTHON=${PYTHON:-python3}
wheels=${GPU_WHEELS:-$root/.gpu-wheels}
if compgen -G "$wheels/*.whl" > /dev/null; then
  site=${GPU_SITE:-${TMPDIR:-/tmp}/megatron-gpu-site}
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m benchmarks.gpu "$@"

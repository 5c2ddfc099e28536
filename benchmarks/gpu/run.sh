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
# shellcheck source=benchmarks/gpu/install.sh
source benchmarks/gpu/install.sh
exec "$PYTHON" -m benchmarks.gpu "$@"

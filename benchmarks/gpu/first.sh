#!/usr/bin/env bash
# The most important checks in the first 15 minutes on a GPU: `bash benchmarks/gpu/first.sh A`, then `B`, then `failed`.
# benchmarks/gpu/first.py has the steps and their time limits; docs/accelerators.md describes the use.
#
#   bash benchmarks/gpu/first.sh prepare     # before, on a machine with a network: wheels and CPU references
#   bash benchmarks/gpu/first.sh A           # 520 s at most: canary, speed, tests, training
#   bash benchmarks/gpu/first.sh B           # 170 s at most: faults, layouts, documents
#   bash benchmarks/gpu/first.sh A --dry     # the same steps on a CPU with toy sizes, without the limits of 15 minutes
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
if [ "${1:-}" = prepare ]; then
  shift
  bash benchmarks/gpu/run.sh wheels "$@"
  # shellcheck source=tools/setup.sh
  source tools/setup.sh run
  exec "$PYTHON" -m benchmarks.gpu.references
fi
# shellcheck source=benchmarks/gpu/install.sh
source benchmarks/gpu/install.sh
exec "$PYTHON" -m benchmarks.gpu.first "$@"

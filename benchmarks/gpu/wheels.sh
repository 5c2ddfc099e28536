#!/usr/bin/env bash
# Gathers what the Python of a GPU machine without a network lacks, beforehand and here, into .gpu-wheels (GPU_WHEELS
# names another folder): `bash benchmarks/gpu/wheels.sh [--python 3.12] [--have FILE] [--out DIR]`; `--help` lists all.
# Take the folder along with the repository; benchmarks/gpu/run.sh installs it there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=tools/setup.sh
source "$root/tools/setup.sh" run                 # sets PYTHON: the versions that were tested here are carried
cd "$root"
exec "$PYTHON" -m benchmarks.gpu.wheels "$@"

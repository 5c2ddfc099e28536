#!/usr/bin/env bash
# Rehearse benchmarks/gpu/first.sh on a machine without a GPU, with the software of a GPU machine:
#   bash benchmarks/gpu/rehearse.sh [FOLDER] [STEP...]
#
# FOLDER (default: ~/.cache/megatron-gpu-rehearsal) receives an environment of 5 GB: Python 3.12, torch 2.11.0 with
# CUDA 13 (which imports without a GPU), transformers 5.17 and triton 3.6. DeepSpeed is not installed, but comes from
# wheels as on a GPU machine. FOLDER also receives a copy of the working tree without .git, and the logs. PYTHON312
# selects a Python 3.12, and DRY_FACTOR multiplies the time limits (default: 10).
# The steps run one after another, and a table of them is printed at the end. The exit code is 1 if a step failed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-gpu-rehearsal}
shift || true
mkdir -p "$folder/logs"
folder=$(cd "$folder" && pwd)
packages=(
  torch==2.11.0 triton==3.6.0 transformers==5.17.0 tokenizers safetensors sentencepiece numpy pyarrow tensorboard
  pytest pytest-timeout pytest-xdist hypothesis psutil pyyaml regex requests rich tqdm ninja einops msgpack py-cpuinfo
  jinja2 protobuf tiktoken filelock packaging setuptools
)

find_python() {
  local candidate version
  version=$(pyenv versions --bare 2> /dev/null | grep '^3\.12' | tail -n 1 || true)
  for candidate in "${PYTHON312:-}" "$(command -v python3.12 || true)" \
    "$(pyenv prefix "$version" 2> /dev/null || true)/bin/python3.12"; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2> /dev/null; then
      printf '%s' "$candidate"
      return 0
    fi
  done
  echo "error: Python 3.12 is needed, found none. Install it, or select one: PYTHON312=/path/to/python3.12" >&2
  return 1
}

export PYTHON="$folder/venv/bin/python"
if [ "${packages[*]}" != "$(cat "$folder/venv/.stamp" 2> /dev/null)" ]; then
  python312=$(find_python)
  "$python312" -m venv "$folder/venv"
  "$PYTHON" -m pip install --quiet --no-compile "${packages[@]}"
  printf '%s\n' "${packages[*]}" > "$folder/venv/.stamp"
fi
"$PYTHON" -c 'import sys, torch, transformers as t, triton
print("Python", sys.version.split()[0], *(f"{m.__name__} {m.__version__}" for m in (torch, t, triton)))
sys.exit(torch.version.cuda is None)' || { echo "error: torch 2.11.0 must be a build for CUDA" >&2; exit 1; }

export GPU_WHEELS="$folder/wheels" GPU_SITE="$folder/site"
if ! compgen -G "$GPU_WHEELS/*.whl" > /dev/null; then
  env -u PYTHON bash benchmarks/gpu/run.sh wheels --python 3.12
fi

rm -rf "$folder/tree" && mkdir "$folder/tree"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
  if [ -e "$file" ]; then printf '%s\0' "$file"; fi
done | tar --null -T - -cf - | tar -xf - -C "$folder/tree"
root="$folder/tree"
cd "$root"
# the first process writes the bytecode of torch and transformers, so that dozens of others need not compile them
unset PYTHONPATH PYTHONDONTWRITEBYTECODE
# shellcheck source=benchmarks/gpu/install.sh
source benchmarks/gpu/install.sh
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
run_tests() { "$PYTHON" -m pytest -p no:cacheprovider -p no:xdist --timeout=$((120 * factor)) -vv "$@"; }
run_step() {
  case $1 in
    A) rm -rf "$folder/state" "$folder/out-a" "$folder/out-b"
       bash benchmarks/gpu/first.sh A --dry --dry-factor "$factor" --out "$folder/out-a" --state "$folder/state" ;;
    B) bash benchmarks/gpu/first.sh B --dry --dry-factor "$factor" --out "$folder/out-b" --state "$folder/state" ;;
    contract) run_tests tests/tds/test_deepspeed_contract.py tests/tds/test_private_names.py ;;
    torch_compat) run_tests tests/test_torch_compat.py ;;
    cuda) SIMULATED_DEVICE_DEADLINE_S=$((120 * factor)) run_tests tests/cuda ;;
    *) echo "error: a step must be A, B, contract, torch_compat or cuda, got $1"; return 2 ;;
  esac
}
if [ $# -gt 0 ]; then steps=("$@"); else steps=(contract torch_compat A B cuda); fi

rows=() code=0 factor=${DRY_FACTOR:-10}
for step in "${steps[@]}"; do
  begin=$SECONDS status=passed
  run_step "$step" > "$folder/logs/$step.log" 2>&1 || { status="failed, code $?"; code=1; }
  echo "=== $step: $status"
  tail -n 12 "$folder/logs/$step.log"
  rows+=("$(printf '%-14s %6d s  %s' "$step" $((SECONDS - begin)) "$status")")
done
echo "=== rehearsal; the logs are in $folder/logs"
printf '%s\n' "${rows[@]}"
exit $code

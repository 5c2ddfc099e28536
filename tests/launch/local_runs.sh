# shellcheck shell=bash
# Sourced by local_slurm.sh and local_mpirun.sh with the names of their parts, then what the user gave. Goes to the
# repository's root, refuses a part that is none, and has what both scripts do with runs.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
script=$(basename "$0")
known=$1
shift
parts=${*:-$known}
for part in $parts; do
  [[ " $known " == *" $part "* ]] || { echo "$script: no such part: $part" >&2; exit 2; }
done
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then PYTHON=$PWD/.venv/bin/python; fi
export PYTHON=${PYTHON:-python} DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
tiny=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --batch-size 2 --gas 2 --log-interval 1
  --eval-interval 0 --eval-iters 0 --lr 1e-3 --progress plain)

install() {                                       # install PACKAGE ...: by Debian's apt-get, as root; else 77
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "$script: needs $*, or root and Debian's apt-get" >&2
    exit 77
  fi
  apt-get update > /dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" > /dev/null
}

await() {                                         # await SECONDS WHAT COMMAND ...: until the command succeeds
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    if [ "$SECONDS" -ge "$end" ]; then
      echo "$script: not in time: $what" >&2
      exit 1
    fi
    sleep 0.5
  done
}

has_steps() { [ -f "$1/metrics.jsonl" ] && [ "$(grep -c '"kind":"train"' "$1/metrics.jsonl")" -ge "$2" ]; }

by_our_launcher() {                               # by_our_launcher RUN [flags]: two stages, as the examples have it
  "$PYTHON" -m megatron.launch --nproc-per-node 2 pretrain_gpt2.py --pipe-parallel-size 2 --save "$1" \
    --data-path data/sample/gpt2_text_document --tokenizer-path data/sample/tokenizer.json "${tiny[@]}" "${@:2}" \
    > "$1.log" 2>&1
}

compare() {                                       # compare RUN RUN [BOUND]: the losses of every step; to the bit
  "$PYTHON" - "$@" << 'END'
import sys
from pathlib import Path

from megatron.training.callbacks.metrics_writer import read_metrics

here, there = (
    {each["step"]: each["loss"] for each in read_metrics(Path(run) / "metrics.jsonl") if each["kind"] == "train"}
    for run in sys.argv[1:3]
)
if list(here) != list(there):
    sys.exit(f"  steps differ: {len(here)} and {len(there)}")
apart = max(abs(here[step] - there[step]) for step in there)
print(f"  losses of {len(here)} steps, the last {here[max(here)]:.6f}: apart by at most {apart:.1e}")
sys.exit(apart > float((*sys.argv[3:], 0)[0]))
END
}

run_parts() {
  local part begun
  # shellcheck disable=SC2154  # the script that sources this has it
  "$PYTHON" tools/make_sample_data.py > "$place/data.log" 2>&1
  for part in $parts; do
    echo "== $part"
    begun=$SECONDS
    "$part"
    echo "== $part: well, $((SECONDS - begun)) s"
  done
}

# shellcheck shell=bash
# Common functions of local_slurm.sh and local_mpirun.sh, which source this file with the names of their parts, followed
# by the user's arguments. It changes to the root of the repository and rejects unknown parts.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
script=$(basename "$0")
all_parts=$1
shift
parts=${*:-$all_parts}
for part in $parts; do
  [[ " $all_parts " == *" $part "* ]] || { echo "$script: unknown part: $part. Use one of: $all_parts" >&2; exit 2; }
done
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then PYTHON=$PWD/.venv/bin/python; fi
export PYTHON=${PYTHON:-python} DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
tiny=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --batch-size 2 --gas 2 --log-interval 1
  --eval-interval 0 --eval-iters 0 --lr 1e-3 --progress plain)

install() {                                       # install PACKAGE ...: with apt-get as root; otherwise exit with 77
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "$script: needs $*, or root and Debian's apt-get" >&2
    exit 77
  fi
  apt-get update > /dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" > /dev/null
}

await() {                                         # await SECONDS EVENT COMMAND ...: wait until the command succeeds
  local end=$((SECONDS + $1)) event=$2
  shift 2
  until "$@"; do
    if [ "$SECONDS" -ge "$end" ]; then
      echo "$script: timed out: $event" >&2
      exit 1
    fi
    sleep 0.5
  done
}

has_steps() { [ -f "$1/metrics.jsonl" ] && [ "$(grep -c '"kind":"train"' "$1/metrics.jsonl")" -ge "$2" ]; }

train_with_launcher() {                           # train_with_launcher RUN [flags]: two stages, started by megatron.launch
  "$PYTHON" -m megatron.launch --nproc-per-node 2 pretrain_gpt2.py --pipe-parallel-size 2 --save "$1" \
    --data-path data/sample/gpt2_text_document --tokenizer-path data/sample/tokenizer.json "${tiny[@]}" "${@:2}" \
    > "$1.log" 2>&1
}

compare() {                                       # compare RUN RUN [TOLERANCE]: losses of every step; default 0
  "$PYTHON" - "$@" << 'END'
import sys
from pathlib import Path

from megatron.training.callbacks.metrics_writer import read_metrics

losses, expected_losses = (
    {row["step"]: row["loss"] for row in read_metrics(Path(run) / "metrics.jsonl") if row["kind"] == "train"}
    for run in sys.argv[1:3]
)
if list(losses) != list(expected_losses):
    sys.exit(f"  steps differ: {len(losses)} and {len(expected_losses)}")
difference = max(abs(losses[step] - expected_losses[step]) for step in losses)
print(f"  losses of {len(losses)} steps, the last {losses[max(losses)]:.6f}: largest difference {difference:.1e}")
sys.exit(difference > float((*sys.argv[3:], 0)[0]))
END
}

run_parts() {
  local part start_s
  # shellcheck disable=SC2154  # set by the script that sources this file
  "$PYTHON" tools/make_sample_data.py > "$work_dir/data.log" 2>&1
  for part in $parts; do
    echo "== $part"
    start_s=$SECONDS
    "$part"
    echo "== $part: passed, $((SECONDS - start_s)) s"
  done
}

#!/usr/bin/env bash
# Test examples/launch/mpirun.sh with Open MPI on a single machine (Debian, as root). Run it in the repository:
#   bash tests/launch/local_mpirun.sh [PART ...]
#
#   ranks     two ranks may use all cores, and their losses are bitwise equal to those with megatron.launch
#   killed    a rank is killed: mpirun ends the other rank and exits with a non-zero code
#   warned    SIGUSR1 to mpirun: the ranks save and exit with 75; the same command resumes with bitwise equal losses
#
# It installs openmpi-bin if necessary. The exit code is 0 on success, and 77 if the tests cannot run here.
set -euo pipefail
# shellcheck source=tests/launch/local_runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/local_runs.sh" "ranks killed warned" "$@"
if ! command -v mpirun > /dev/null; then install openmpi-bin; fi

work_dir=$(mktemp -d /tmp/local-mpirun-XXXXXX)
export NUM_RANKS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=${LOCAL_MPI_PORT:-29617}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1        # allows more ranks than cores

clean_up() {
  local code=$?
  if [ "$code" -ne 0 ]; then tail -n 30 "$work_dir"/*.log; fi
  for pid in $(jobs -p) $(ranks_of "$work_dir"); do kill -KILL "$pid" 2> /dev/null || true; done
  rm -rf "$work_dir"
  exit "$code"
}

# ---- helpers

ranks_of() {                                      # ranks_of PATH: pids of the ranks with PATH in their arguments
  local pid
  for pid in $(grep -slzF -- "$1" /proc/[0-9]*/cmdline | tr -cd '0-9\n'); do
    if grep -sqz "^OMPI_COMM_WORLD_RANK=" "/proc/$pid/environ"; then echo "$pid"; fi
  done
}

has_no_ranks() { [ -z "$(ranks_of "$1")" ]; }

job() {                                           # job NAME [flags]: train with mpirun
  local name=$1
  shift
  bash examples/launch/mpirun.sh "${tiny[@]}" --save "$work_dir/$name" "$@" > "$work_dir/$name.log" 2>&1
}

# ---- the parts

ranks() {
  job ranks --train-iters 20 &
  local mpirun=$! pid cores
  await 120 "the ranks start" has_steps "$work_dir/ranks" 1
  for pid in $(ranks_of "$work_dir/ranks"); do
    cores=$(grep Cpus_allowed_list "/proc/$pid/status" | cut -f 2)
    echo "  rank $(grep -z "^OMPI_COMM_WORLD_RANK=" "/proc/$pid/environ" | tr -cd '0-9'): cores $cores"
    [ "$cores" = "$(grep Cpus_allowed_list /proc/$$/status | cut -f 2)" ]
  done
  wait "$mpirun"
  train_with_launcher "$work_dir/launch" --train-iters 20
  compare "$work_dir/ranks" "$work_dir/launch"
}

killed() {
  job killed --train-iters 100000 &
  local mpirun=$! start_s code=0
  await 120 "the ranks train" has_steps "$work_dir/killed" 3
  start_s=$SECONDS
  kill -KILL "$(ranks_of "$work_dir/killed" | tail -n 1)"
  wait "$mpirun" || code=$?
  grep -h "noticed\|exited\|signal" "$work_dir/killed.log" | sed 's/^/  /'
  echo "  rank killed: mpirun exited with code $code after $((SECONDS - start_s)) s"
  [ "$code" -ne 0 ]
  await 10 "all ranks have exited" has_no_ranks "$work_dir/killed"
}

warned() {
  job uninterrupted --train-iters 60
  job warned --train-iters 60 --resume --load-if-exists &
  local job=$! mpirun code=0
  await 120 "the ranks train" has_steps "$work_dir/warned" 10
  mpirun=$(pgrep -P "$job" mpirun || pgrep -P "$(pgrep -P "$job" | head -n 1)" mpirun)
  kill -USR1 "$mpirun"
  wait "$job" || code=$?
  grep -h "^stopped" "$work_dir/warned.log" | cut -c 1-100 | sed 's/^/  /'
  echo "  SIGUSR1 to mpirun: exit code $code"
  [ "$code" -eq 75 ]
  job warned --train-iters 60 --resume --load-if-exists
  compare "$work_dir/warned" "$work_dir/uninterrupted"
}

trap clean_up EXIT
trap 'exit 130' INT TERM
mpirun --version | head -n 1
run_parts

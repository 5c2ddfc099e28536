#!/usr/bin/env bash
# examples/launch/mpirun.sh under a real Open MPI, on this machine alone, as root on Debian. From the repository:
#   bash tests/launch/local_mpirun.sh [PART ...]
#
#   ranks     two ranks train, with the losses of our launcher to the bit, and may use all cores
#   killed    one of them is killed: mpirun ends the other and says so with its code
#   warned    SIGUSR1 to mpirun: the ranks save and leave with 75; the same command goes on, as if it had not stopped
#
# Installs openmpi-bin where it is missing. Ends with 0 when all is well, with 77 where it cannot be run.
set -euo pipefail
# shellcheck source=tests/launch/local_runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/local_runs.sh" "ranks killed warned" "$@"
if ! command -v mpirun > /dev/null; then install openmpi-bin; fi

place=$(mktemp -d /tmp/local-mpirun-XXXXXX)
export NUM_RANKS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=${LOCAL_MPI_PORT:-29617}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1        # two ranks on one core, too

clean_up() {
  local code=$?
  if [ "$code" -ne 0 ]; then tail -n 30 "$place"/*.log; fi
  for pid in $(jobs -p) $(ranks_of "$place"); do kill -KILL "$pid" 2> /dev/null || true; done
  rm -rf "$place"
  exit "$code"
}

# ---- what the parts use

ranks_of() {                                      # ranks_of PATH: the processes that save there, or below it
  local pid
  for pid in $(grep -slzF -- "$1" /proc/[0-9]*/cmdline | tr -cd '0-9\n'); do
    if grep -sqz "^OMPI_COMM_WORLD_RANK=" "/proc/$pid/environ"; then echo "$pid"; fi
  done
}

has_no_ranks() { [ -z "$(ranks_of "$1")" ]; }

job() {                                           # job NAME [flags]: by mpirun
  local name=$1
  shift
  bash examples/launch/mpirun.sh "${tiny[@]}" --save "$place/$name" "$@" > "$place/$name.log" 2>&1
}

# ---- the parts

ranks() {
  job ranks --train-iters 20 &
  local mpirun=$! pid cores
  await 120 "the ranks begin" has_steps "$place/ranks" 1
  for pid in $(ranks_of "$place/ranks"); do
    cores=$(grep Cpus_allowed_list "/proc/$pid/status" | cut -f 2)
    echo "  rank $(grep -z "^OMPI_COMM_WORLD_RANK=" "/proc/$pid/environ" | tr -cd '0-9'): cores $cores"
    [ "$cores" = "$(grep Cpus_allowed_list /proc/$$/status | cut -f 2)" ]
  done
  wait "$mpirun"
  by_our_launcher "$place/launch" --train-iters 20
  compare "$place/ranks" "$place/launch"
}

killed() {
  job killed --train-iters 100000 &
  local mpirun=$! begun code=0
  await 120 "the ranks train" has_steps "$place/killed" 3
  begun=$SECONDS
  kill -KILL "$(ranks_of "$place/killed" | tail -n 1)"
  wait "$mpirun" || code=$?
  grep -h "noticed\|exited\|signal" "$place/killed.log" | sed 's/^/  /'
  echo "  a killed rank: mpirun ended with code $code after $((SECONDS - begun)) s"
  [ "$code" -ne 0 ]
  await 10 "no rank is left" has_no_ranks "$place/killed"
}

warned() {
  job whole --train-iters 60
  job warned --train-iters 60 --resume --load-if-exists &
  local job=$! mpirun code=0
  await 120 "the ranks train" has_steps "$place/warned" 10
  mpirun=$(pgrep -P "$job" mpirun || pgrep -P "$(pgrep -P "$job" | head -n 1)" mpirun)
  kill -USR1 "$mpirun"
  wait "$job" || code=$?
  grep -h "^stopped" "$place/warned.log" | cut -c 1-100 | sed 's/^/  /'
  echo "  SIGUSR1 to mpirun: it ended with code $code"
  [ "$code" -eq 75 ]
  job warned --train-iters 60 --resume --load-if-exists
  compare "$place/warned" "$place/whole"
}

trap clean_up EXIT
trap 'exit 130' INT TERM
mpirun --version | head -n 1
run_parts

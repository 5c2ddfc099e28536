#!/usr/bin/env bash
# An elastic run of GPT-2 with one job per host: it continues when hosts are lost and re-adds them (docs/launching.md).
#   HOSTS=node[0-7] MIN_NODES=6 bash examples/slurm/elastic.sh [flags of run_gpt2.sh]
# SLURM removes a lost host from a job permanently. With one job per host, it requeues only the job of the lost host and
# starts it when the host is back. The jobs need not start simultaneously: the first start waits for all of them for
# --init-timeout, then begins with at least MIN_NODES hosts.
# Run it in the repository on the submit host. All jobs have the same name: scancel --name=gpt2-elastic ends the run.
set -euo pipefail

: "${HOSTS:?must name the hosts, as in HOSTS=node[0-7]}" "${MIN_NODES:?must be the fewest hosts that train}"
mapfile -t hosts < <(scontrol show hostnames "$HOSTS")
if ! [[ $MIN_NODES =~ ^[0-9]+$ ]] || [ "$MIN_NODES" -lt 1 ] || [ "$MIN_NODES" -gt ${#hosts[@]} ]; then
  echo "elastic.sh: MIN_NODES must be 1 to ${#hosts[@]}, the number of hosts, got $MIN_NODES" >&2
  exit 2
fi
name=${JOB_NAME:-gpt2-elastic}

# The same for all jobs. Set NODE_LIST if the hosts reach each other under other names, or as HOST:PORT.
NODE_LIST=${NODE_LIST:-$(IFS=,; echo "${hosts[*]}")}
NNODES=$MIN_NODES:${#hosts[@]}
MASTER_PORT=${MASTER_PORT:-29500}
RUN_FOLDER=${RUN_FOLDER:-runs/$name-$(date +%Y%m%d-%H%M%S)}
export NODE_LIST NNODES MASTER_PORT RUN_FOLDER

for NODE_RANK in "${!hosts[@]}"; do
  export NODE_RANK
  # shellcheck disable=SC2086 # SBATCH_FLAGS is empty or several words: account, partition, GPUs
  sbatch --job-name="$name" --nodes=1 --nodelist="${hosts[NODE_RANK]}" --output="slurm-%x-$NODE_RANK.log" \
    ${SBATCH_FLAGS:-} examples/slurm/gpt2.sh --max-restarts 50 --init-timeout 600 "$@" || {
    echo "elastic.sh: sbatch refused the job of host ${hosts[NODE_RANK]}; \`scancel --name=$name\` ends the others" >&2
    exit 1
  }
done

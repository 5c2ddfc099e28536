# shellcheck shell=bash
# Sourced by the run scripts with the name of their model and the user's flags, once they have set their variables and
#   own       their own variables, each behind its flag: those that not every run script has
#   recipe    flags that hold where neither the user's flags nor the JSON say otherwise
#   stories   such flags for the sample data alone; not every run script has any
#   by_machine   a function that adds to recipe what GPUS_PER_NODE, pp_size and mp_size decide; not every script has one
#   program   what trains the model; without it pretrain_<model>.py, which lies beside the run script
# Makes the set-up and the sample data where they are needed, then starts the program on every device, with
# ds_config_<model>.json from beside the run script. Of the user's flags --max-restarts, --stop-grace, --exit-grace, --init-timeout, --node-list and
# --node-timeout are the launcher's.
set -euo pipefail
trap 'exit 75' USR1                               # SLURM's warning while there is nothing yet to save
model=$1
shift

launch=()
rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --max-restarts | --stop-grace | --exit-grace | --init-timeout | --node-list | --node-timeout)
      launch+=("$1")
      if [ $# -gt 1 ]; then launch+=("$2") && shift; fi
      ;;
    --max-restarts=* | --stop-grace=* | --exit-grace=* | --init-timeout=* | --node-list=* | --node-timeout=*)
      launch+=("$1")
      ;;
    *) rest+=("$1") ;;
  esac
  shift
done
set -- ${rest[@]+"${rest[@]}"}

flags=()                                          # what the user set
variables=                                        # which flag a variable sets, for messages
add() {                                           # add FLAG VARIABLE: pass the variable as a flag if it is set
  variables+="$1=$2 "
  if [ -n "${!2:-}" ]; then flags+=("$1" "${!2}"); fi
}
add --pipe-parallel-size pp_size
add --model-parallel-size mp_size
add --context-parallel-size cp_size
add --num-layers NLAYERS
add --hidden-size NHIDDEN
add --num-attention-heads NHEADS
for ((i = 0; i < ${#own[@]}; i += 2)); do add "${own[i]}" "${own[i + 1]}"; done
add --batch-size BATCHSIZE
add --gas GAS
add --train-iters TRAIN_ITERS
add --data-path DATA_PATH
add --tokenizer-path TOKENIZER
add --deepspeed_config config_json
add --save CHECKPOINT_PATH

export GPUS_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT pp_size mp_size cp_size
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" run
home=$root
if [ ! -e "$home/ds_config_$model.json" ]; then home=$root/examples/$model; fi
if [ -n "${program:-}" ]; then program=$root/$program; else program=$home/pretrain_$model.py; fi
is_dry=
is_help=
has_data=$DATA_PATH
if [[ " ${MEGATRON_DEFAULTS:-} " =~ [[:space:]]--(((train|valid|test)-)?data-path|sft)[[:space:]=] ]]; then has_data=1; fi
file=                                             # of --config
for flag in "$@"; do
  if [ "$file" = next ]; then file=$flag; fi
  case $flag in
    --config) file=next ;;
    --config=*) file=${flag#*=} ;;
    -h | --help | --help-all) is_help=$flag ;;
    --dry-run) is_dry=1 ;;
    --data-path | --data-path=* | --*-data-path | --*-data-path=* | --sft | --sft=*) has_data=1 ;;
  esac
done

if [ -f "$file" ] && grep -qE '(^|["[:space:]{,])(((train|valid|test)[-_])?data[-_]path|sft)"?[[:space:]]*[:=]' "$file"; then has_data=1; fi
if [ -z "$has_data" ] && [[ " ${MEGATRON_DEFAULTS:-} $* " =~ [[:space:]]--(resume|load|config)[[:space:]=] ]]; then
  # a run on other data than the sample goes on with its own, which the program takes from the run's settings
  name=$(basename "$program" .py)
  has_data=$(MEGATRON_DEFAULTS="$recipe ${MEGATRON_DEFAULTS:-}" "$PYTHON" -m megatron.checkpoint.run_data "${name#pretrain_}" ${flags[@]+"${flags[@]}"} "$@" || true)
fi

machine=$("$PYTHON" -m megatron.launch.machine) || { code=$? && [ -n "$is_help" ]; } || exit "$code"
if [ -n "$machine" ]; then
  eval "$machine"
  if declare -F by_machine > /dev/null; then by_machine; fi
fi

quoted() {                                        # quoted TEXT: one word for whoever reads the recipe
  local quote="'"
  printf "'%s'" "${1//$quote/$quote\\$quote$quote}"
}
if [ -n "$pp_size" ] && [ -n "$mp_size" ]; then
  recipe="--pipe-parallel-size $pp_size --model-parallel-size $mp_size $recipe"
fi
recipe="$recipe
  --deepspeed_config $(quoted "$home/ds_config_$model.json")"
if [ -z "$has_data" ]; then
  sample=$root/data/sample                        # of every model: one token file and one vocabulary
  recipe+=" --data-path $(quoted "$sample/gpt2_text_document") --split 900,50,50 ${stories:-}"
  if [ -n "$is_help" ]; then
    recipe+=" --tokenizer-path $(quoted "$sample/tokenizer.json")"
  elif [ -z "$is_dry" ]; then
    "$PYTHON" "$root/tools/make_sample_data.py"   # quick where it is of this version
    recipe+=" --tokenizer-path $(quoted "$sample/tokenizer.json")"
  else                                            # whatever lies there: the run makes what is missing or older anew
    export MEGATRON_TEXT_VOCABULARY=2400          # of make_sample_data.py; T5 adds to it as it will in the run
  fi
fi
export MEGATRON_DEFAULTS="$recipe ${MEGATRON_DEFAULTS:-}" MEGATRON_VARIABLES=$variables

if [ -n "$is_help" ]; then                        # with the defaults of this script, and what its variables set
  for flag in ${flags[@]+"${flags[@]}"}; do MEGATRON_DEFAULTS+=" $(quoted "$flag")"; done
  MEGATRON_RUN_SCRIPT=$0 exec "$PYTHON" "$program" "$is_help"
fi
if [ -n "$is_dry" ]; then
  WORLD_SIZE=$((GPUS_PER_NODE * ${NNODES#*:})) exec "$PYTHON" "$program" ${flags[@]+"${flags[@]}"} "$@"
fi
trap '' USR1                                      # the launcher has a handler of its own, an instant after it begins
# shellcheck disable=SC2086 # LAUNCH_FLAGS is empty or several words
exec "$PYTHON" -m megatron.launch --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" $LAUNCH_FLAGS ${launch[@]+"${launch[@]}"} "$program" \
  ${flags[@]+"${flags[@]}"} "$@"

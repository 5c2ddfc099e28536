# shellcheck shell=bash
# Set up the environment and the sample data if necessary, then start the training program on every device with
# ds_config_<model>.json from the folder of the run script.
#
# A run script sources this file with the name of its model and the user's flags, after setting its variables and:
#   script_flags array of pairs (flag, variable) for variables that only some run scripts have
#   recipe       default flags, which the user's flags and the JSON override
#   stories      default flags for the sample data (optional)
#   by_machine   function that appends flags to recipe depending on GPUS_PER_NODE, pp_size and mp_size (optional)
#   program      training program; default: pretrain_<model>.py in the folder of the run script
#
# The flags --max-restarts, --stop-grace, --exit-grace, --init-timeout, --node-list and --node-timeout are passed to the
# launcher, all other flags to the program. --tour starts examples/tour/tour.py with the other arguments instead.
set -euo pipefail
trap 'exit 75' USR1                               # SLURM's warning before there is anything to save
model=$1
shift

launch=()
rest=()
is_tour=
while [ $# -gt 0 ]; do
  case $1 in
    --max-restarts | --stop-grace | --exit-grace | --init-timeout | --node-list | --node-timeout)
      launch+=("$1")
      if [ $# -gt 1 ]; then launch+=("$2") && shift; fi
      ;;
    --max-restarts=* | --stop-grace=* | --exit-grace=* | --init-timeout=* | --node-list=* | --node-timeout=*)
      launch+=("$1")
      ;;
    --tour) is_tour=1 ;;
    *) rest+=("$1") ;;
  esac
  shift
done
set -- ${rest[@]+"${rest[@]}"}

flags=()                                          # flags of the variables that the user set
variables=                                        # FLAG=VARIABLE pairs, for messages
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
for ((i = 0; i < ${#script_flags[@]}; i += 2)); do add "${script_flags[i]}" "${script_flags[i + 1]}"; done
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
if [ -n "$is_tour" ]; then
  if [ "$model" = gpt2 ]; then exec "$PYTHON" -m examples.tour.tour "$@"; fi
  echo "error: --tour needs the small GPT-2, got $(basename "$0"). Use bash run_gpt2.sh --tour" >&2
  exit 2
fi
home=$root
if [ ! -e "$home/ds_config_$model.json" ]; then home=$root/examples/$model; fi
if [ -z "${program:-}" ]; then program=$home/pretrain_$model.py; elif [[ $program != /* ]]; then program=$root/$program; fi
is_dry=
is_help=
has_data=$DATA_PATH
if [[ " ${MEGATRON_DEFAULTS:-} " =~ [[:space:]]--(((train|valid|test)-)?data-path|sft)[[:space:]=] ]]; then has_data=1; fi
file=                                             # value of --config
for flag in "$@"; do
  if [ "$file" = next ]; then file=$flag; fi
  case $flag in
    --config) file=next ;;
    --config=*) file=${flag#*=} ;;
    -h | --help | --help-all) is_help=$flag ;;
    --dry-run | --prove-only) is_dry=1 ;;
    --data-path | --data-path=* | --*-data-path | --*-data-path=* | --sft | --sft=*) has_data=1 ;;
  esac
done

if [ -f "$file" ] && grep -qE '(^|["[:space:]{,])(((train|valid|test)[-_])?data[-_]path|sft)"?[[:space:]]*[:=]' "$file"; then has_data=1; fi
if [ -z "$has_data" ] && [[ " ${MEGATRON_DEFAULTS:-} $* " =~ [[:space:]]--(resume|load|config)[[:space:]=] ]]; then
  # A run on other data than the sample resumes with its own data, which the program reads from the run's settings.
  name=$(basename "$program" .py)
  has_data=$(MEGATRON_DEFAULTS="$recipe ${MEGATRON_DEFAULTS:-}" "$PYTHON" -m megatron.checkpoint.run_data "${name#pretrain_}" ${flags[@]+"${flags[@]}"} "$@" || true)
fi

machine=$("$PYTHON" -m megatron.launch.machine) || { code=$? && [ -n "$is_help" ]; } || exit "$code"
if [ -n "$machine" ]; then
  eval "$machine"
  if declare -F by_machine > /dev/null; then by_machine; fi
fi

quoted() {                                        # quoted TEXT: quote TEXT as one word of the recipe
  local quote="'"
  printf "'%s'" "${1//$quote/$quote\\$quote$quote}"
}
if [ -n "$pp_size" ] && [ -n "$mp_size" ]; then
  recipe="--pipe-parallel-size $pp_size --model-parallel-size $mp_size $recipe"
fi
recipe="$recipe
  --deepspeed_config $(quoted "$home/ds_config_$model.json")"
if [ -z "$has_data" ]; then
  sample=$root/data/sample                        # one token file and one vocabulary for all models
  recipe+=" --data-path $(quoted "$sample/gpt2_text_document") --split 900,50,50 ${stories:-}"
  if [ -n "$is_help" ]; then
    recipe+=" --tokenizer-path $(quoted "$sample/tokenizer.json")"
  elif [ -z "$is_dry" ]; then
    "$PYTHON" "$root/tools/make_sample_data.py"   # returns immediately if the data is up to date
    recipe+=" --tokenizer-path $(quoted "$sample/tokenizer.json")"
  else                                            # a dry run creates no data and accepts missing or old data
    export MEGATRON_TEXT_VOCABULARY=2400          # vocabulary size of make_sample_data.py; T5 adds its sentinel tokens
  fi
fi
export MEGATRON_DEFAULTS="$recipe ${MEGATRON_DEFAULTS:-}" MEGATRON_VARIABLES=$variables

if [ -n "$is_help" ]; then                        # --help shows the defaults of this script and of its variables
  for flag in ${flags[@]+"${flags[@]}"}; do MEGATRON_DEFAULTS+=" $(quoted "$flag")"; done
  MEGATRON_RUN_SCRIPT=$0 exec "$PYTHON" "$program" "$is_help"
fi
if [ -n "$is_dry" ]; then
  WORLD_SIZE=$((GPUS_PER_NODE * ${NNODES#*:})) exec "$PYTHON" "$program" ${flags[@]+"${flags[@]}"} "$@"
fi
trap '' USR1                                      # ignored until the launcher installs its own handler
# shellcheck disable=SC2086 # LAUNCH_FLAGS is empty or several words
exec "$PYTHON" -m megatron.launch --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" $LAUNCH_FLAGS ${launch[@]+"${launch[@]}"} "$program" \
  ${flags[@]+"${flags[@]}"} "$@"

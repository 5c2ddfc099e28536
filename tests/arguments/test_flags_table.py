"""The table of other trainers' flags: every row has the effect that it states, and every flag of CPM has one."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron.arguments import flags_doc, translate
from megatron.arguments.flag_values import all_options, family_options, rejected_flags
from megatron.arguments.foreign_flags import (
    BY_VALUE,
    CONVERTED,
    DENSE_ONLY,
    IGNORED,
    REJECTED,
    TABLE,
    ForeignFlag,
    flags_with_rule,
    foreign_flags,
)
from megatron.config import OptimizerConfig, parse
from megatron.config.option import options_of
from megatron.errors import ConfigError
from megatron.models.registry import FAMILIES
from tests.helpers.rows import check_rows

DOCS = Path(__file__).parents[2] / "docs"
CPM_FLAGS = """
--num-layers --num-unique-layers --param-sharing-style --hidden-size --kv-hidden-size --ff-hidden-size
--num-attention-heads --max-position-embeddings --make-vocab-size-divisible-by --layernorm-epsilon
--apply-residual-connection-post-layernorm --openai-gelu --onnx-safe --attention-dropout --hidden-dropout --weight-decay
--clip-grad --adam-beta1 --adam-beta2 --adam-eps --batch-size --gas --checkpoint-activations
--distribute-checkpointed-activations --checkpoint-num-layers --train-iters --log-interval --exit-interval
--tensorboard-dir --scaled-upper-triang-masked-softmax-fusion --scaled-masked-softmax-fusion --bias-gelu-fusion
--bias-dropout-fusion --hidden-bias --cpu-optimizer --cpu_torch_adam --seed --init-method-std --lr --lr-decay-style
--lr-decay-iters --min-lr --warmup --override-lr-scheduler --use-checkpoint-lr-scheduler --save --save-interval
--no-save-optim --no-save-rng --load --no-load-optim --no-load-rng --finetune --fp16 --apply-query-key-layer-scaling
--attention-softmax-in-fp32 --fp32-allreduce --hysteresis --loss-scale --loss-scale-window --min-scale
--fp16-lm-cross-entropy --model-parallel-size --pipe-parallel-size --distributed-backend --local_rank --lazy-mpu-init
--use-cpu-initialization --eval-iters --eval-interval --data-path --split --vocab-file --merge-file --seq-length
--enc-seq-length --dec-seq-length --mask-prob --short-seq-prob --mmap-warmup --num-workers --tokenizer-type --data-impl
--reset-position-ids --reset-attention-mask --eod-mask-loss --adlr-autoresume --adlr-autoresume-interval --ict-head-size
--ict-load --bert-load --titles-data-path --query-in-block-prob --use-one-sent-docs --report-topk-accuracies
--faiss-use-gpu --block-data-path --indexer-batch-size --indexer-log-interval --zero-reduce-scatter
--zero-contigious-gradients --deepspeed-activation-checkpointing --partition-activations --contigious-checkpointing
--checkpoint-in-cpu --synchronize-each-layer --profile-backward --deepspeed --deepspeed_config --deepscale
--deepscale_config --deepspeed_mpi
""".split()
"""The flags of CPM-Pretrain, in the order of its --help."""
IGNORED_ROWS = list(flags_with_rule(IGNORED, BY_VALUE, DENSE_ONLY))
OPTIONS_BY_FLAG = {flag: option for _, option in all_options() for flag in option.flags}
UNSUPPORTED_IN_T5 = (
    "--use-rotary-position-embeddings",  # selects a value of --position-embedding-type that T5 does not have
    "--context-parallel-size",  # only 1 is accepted: tests/arguments/test_context_parallel.py
    "--pipeline-model-parallel-layout",  # for one stack of layers: tests/config/test_pipeline_layout.py
)
REQUIRED_FLAGS = {
    **dict.fromkeys(
        ("--checkpoint-num-layers", "--recompute-num-layers", "--activations-checkpoint-num-layers"),
        ["--checkpoint-activations"],
    ),
    **dict.fromkeys(("--cpu-adam", "--cpu_torch_adam", "--no-pin-memory"), ["--offload-optimizer"]),
    **dict.fromkeys(("--offload-parameters", "--offload-param"), ["--zero-stage", "3"]),
    "--weight-decay-incr-style": ["--start-weight-decay", "0", "--end-weight-decay", "1"],
    "--start-weight-decay": ["--weight-decay-incr-style", "linear", "--end-weight-decay", "1"],
    "--end-weight-decay": ["--weight-decay-incr-style", "linear", "--start-weight-decay", "0"],
    "--stability-patience": ["--stability-guard", "skip"],
    **dict.fromkeys(("--debug-dump-steps", "--debug-dump-modules", "--debug-dump-tensors"), ["--debug-dump", "x"]),
    **{
        flag: ["--checkpoint-activations", "--model-parallel-size", "2", "--num-attention-heads", "4"]
        for flag in (
            "--partition-activations",
            "--distribute-checkpointed-activations",
            "--distribute-saved-activations",
            "--checkpoint-in-cpu",
            "--contigious-checkpointing",
            "--contiguous-checkpointing",
        )
    },
    "--sequence-parallel": ["--model-parallel-size", "2", "--num-attention-heads", "4"],
    **{
        flag: ["--optimizer", optimizer]
        for optimizer in ("muon", "adaptive_muon", "sgd")
        for option in options_of(OptimizerConfig)
        for flag in option.flags
        if option.name.startswith(f"{optimizer}_")
    },
    "--min-lr": ["--lr", "1"],
    "--lr-head": ["--lr-embedding", "0.4"],
    "--decoupled-min-lr": ["--decoupled-lr", "1"],
    "--wsd-decay-fraction": ["--lr-decay-style", "wsd"],
    "--num-attention-heads": ["--kv-hidden-size", "8"],
    "--hidden-size": ["--kv-hidden-size", "8"],
    "--pipe-parallel-size": ["--num-layers", "6"],
    "--pipeline-model-parallel-size": ["--num-layers", "6"],
    "--pipeline-schedule": ["--pipe-parallel-size", "2"],
    "--enable-zbh1-pipeline": ["--pipe-parallel-size", "2"],
    **dict.fromkeys(("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"), ["--lr-decay-style", "wsd"]),
    "--lr-wsd-decay-style": ["--lr-decay-style", "wsd"],
    "--pipeline-trace": ["--pipe-parallel-size", "2"],
    "--check-data-agreement": ["--pipe-parallel-size", "2"],
    "--pipeline-placement": ["--pipe-parallel-size", "2"],
    "--pipeline-auto-schedules": ["--pipe-parallel-size", "2", "--pipeline-schedule", "auto"],
    "--pipeline-schedule-file": ["--pipe-parallel-size", "2", "--gas", "1"],
    "--pipeline-model-parallel-layout": ["--pipe-parallel-size", "2", "--num-layers", "2"],
    **{
        flag: ["--pipe-parallel-size", "2", "--num-layers", "12"]
        for flag in (
            "--pipeline-chunks",
            "--num-virtual-stages-per-pipeline-rank",
            "--virtual-pipeline-model-parallel-size",
            "--num-layers-per-virtual-pipeline-stage",
            "--microbatch-group-size-per-virtual-pipeline-stage",
        )
    },
    **{
        flag: ["--load", "x"]
        for flag in (
            "--finetune",
            "--no-load-optim",
            "--no-load-rng",
            "--eval-only",
            "--allow-data-change",
            "--load-if-exists",
            "--strict-load",
            "--load-weights-only",
            "--allow-vocab-change",
        )
    },
    "--resize-vocab": ["--load", "somewhere", "--finetune"],
    **dict.fromkeys(("--valid-sft", "--chat-template", "--sft-overlong"), ["--sft", __file__]),
    "--eval-tasks-interval": ["--eval-tasks", __file__],
    "--no-prompt-bos": ["--sample-prompts", "the"],
    "--keep-every": ["--keep-last", "1"],
    "--check-paths": ["--dry-run"],
    "--mixture-schedule": ["--data-path", "1", "a", "1", "b", "--dry-run"],
    "--prefetch-factor": ["--num-workers", "1"],
    "--fim-spm-rate": ["--fim-rate", "0.5"],
    **dict.fromkeys(
        ("--wandb-exp-name", "--wandb-name", "--wandb-save-dir", "--wandb-entity"), ["--wandb-project", "p"]
    ),
    "--swanlab-mode": ["--swanlab-project", "p"],
    "--metrics-host": ["--metrics-port", "9464"],
    "--rampup-batch-size": ["--batch-size", "1", "--gas", "8"],
    "--step-batch-size-schedule": ["--batch-size", "2"],
    **{
        flag: ["--train-iters", "0", "--eval-iters", "0", "--dry-run"]
        for flag in ("--train-data-path", "--valid-data-path", "--test-data-path")
    },
}
_ROPE_FLAGS = ["--position-embedding-type", "rope"]
_YARN_FLAGS = [*_ROPE_FLAGS, "--rotary-scaling", "yarn"]
_LONGROPE_FLAGS = [
    *_ROPE_FLAGS, *"--kv-hidden-size 4 --rotary-scaling longrope".split(),
    *"--rotary-short-factors [1.0,2.0] --rotary-long-factors [1.0,3.0]".split(),
]  # fmt: skip
_GROUPED_QUERY_FLAGS = ["--num-attention-heads", "6", "--hidden-size", "12"]
_EXPERT_FLAGS = ["--num-experts", "8"]
_LATENT_FLAGS = [*_ROPE_FLAGS, "--multi-latent-attention"]
_SIGMOID_ROUTER_FLAGS = [*_EXPERT_FLAGS, "--moe-router-score-function", "sigmoid"]
_LINEAR_SIZES = {
    "--linear-num-key-heads": "2", "--linear-num-value-heads": "4", "--linear-key-head-dim": "4",
    "--linear-value-head-dim": "4",
}  # fmt: skip
_MAMBA_SIZES = {"--mamba-num-heads": "6", "--mamba-num-groups": "2", "--mamba-head-dim": "4", "--mamba-state-dim": "3"}


def _mixer_flags(variant: str, flag: str = "", **sizes: str) -> list[str]:
    """Return the flags of a model with small recurrent mixers, except ``flag``."""
    values = {**(_MAMBA_SIZES if variant == "mamba2" else _LINEAR_SIZES), "--experimental-attention-variant": variant}
    values |= {f"--{name.replace('_', '-')}": value for name, value in sizes.items()}
    return [word for name, value in values.items() if name != flag for word in (name, value)]


_RECURRENT_REQUIRED_FLAGS = {
    "--linear-attention-freq": _mixer_flags("gated_delta_net"),
    "--experimental-attention-variant": _mixer_flags("gated_delta_net", "--experimental-attention-variant"),
    **{
        flag: _mixer_flags("gated_delta_net", flag)
        for flag in (
            "--linear-conv-kernel-dim",
            "--linear-key-head-dim",
            "--linear-value-head-dim",
            "--linear-num-value-heads",
            "--linear-allow-neg-eigval",
            "--linear-norm-epsilon",
            "--linear-norm-placement",
        )
    },
    "--linear-num-key-heads": _mixer_flags("gated_delta_net", "--linear-num-key-heads", linear_num_value_heads="48"),
    **{
        flag: _mixer_flags("kimi_delta", linear_num_key_heads="4")
        for flag in ("--linear-full-rank-gates", "--linear-decay-limit")
    },
    **{
        flag: _mixer_flags("mamba2", flag)
        for flag in (
            *_MAMBA_SIZES,
            "--mamba-conv-kernel-dim",
            "--no-mamba-conv-bias",
            "--mamba-proj-bias",
            "--mamba-norm",
            "--mamba-norm-groups",
            "--mamba-dt-limit-min",
            "--mamba-dt-limit-max",
        )
    },
    "--mamba-num-groups": _mixer_flags("mamba2", "--mamba-num-groups", mamba_num_heads="24"),
}
_DECODER_REQUIRED_FLAGS = {
    **_RECURRENT_REQUIRED_FLAGS,
    **dict.fromkeys(
        (
            "--moe-ffn-hidden-size",
            "--moe-layer-freq",
            "--moe-router-topk",
            "--moe-router-score-function",
            "--moe-router-pre-softmax",
            "--moe-router-topk-scaling-factor",
            "--moe-aux-loss-coeff",
            "--moe-z-loss-coeff",
            "--moe-expert-capacity-factor",
            "--moe-shared-expert-intermediate-size",
            "--moe-use-residual",
        ),
        _EXPERT_FLAGS,
    ),
    "--mtp-loss-scaling-factor": ["--mtp-num-layers", "1"],
    **dict.fromkeys(("--qk-clip-threshold", "--qk-clip-alpha", "--qk-clip-bound"), ["--qk-clip"]),
    "--moe-router-num-groups": [*_EXPERT_FLAGS, "--moe-router-group-topk", "1"],
    "--moe-router-group-topk": [*_EXPERT_FLAGS, "--moe-router-num-groups", "4"],
    "--moe-router-load-balancing-type": [*_EXPERT_FLAGS, "--moe-aux-loss-coeff", "0.1"],
    **dict.fromkeys(
        ("--moe-token-drop-policy", "--moe-eval-capacity-factor", "--moe-min-capacity"),
        [*_EXPERT_FLAGS, "--moe-expert-capacity-factor", "0.5"],
    ),
    "--moe-router-enable-expert-bias": _SIGMOID_ROUTER_FLAGS,
    "--moe-router-bias-update-rate": _SIGMOID_ROUTER_FLAGS,
    "--moe-router-group-score-topk": [
        *_EXPERT_FLAGS,
        "--moe-router-num-groups",
        "1",
        "--moe-router-group-topk",
        "1",
    ],
    "--multi-latent-attention": _ROPE_FLAGS,
    **dict.fromkeys(
        (
            "--q-lora-rank",
            "--kv-lora-rank",
            "--qk-head-dim",
            "--qk-pos-emb-head-dim",
            "--latent-norm-epsilon",
        ),
        _LATENT_FLAGS,
    ),
    "--mscale": [*_LATENT_FLAGS, "--rotary-scaling", "yarn"],
    "--mscale-all-dim": [*_LATENT_FLAGS, "--rotary-scaling", "yarn"],
    "--moe-shared-expert-gate": [*_EXPERT_FLAGS, "--moe-shared-expert-intermediate-size", "8"],
    "--max-position-embeddings": ["--seq-length", "5"],
    "--num-query-groups": _GROUPED_QUERY_FLAGS,
    "--num-key-value-heads": _GROUPED_QUERY_FLAGS,
    "--rotary-base": _ROPE_FLAGS,
    "--rope-theta": _ROPE_FLAGS,
    "--rotary-position-embeddings-theta": _ROPE_FLAGS,
    "--rotary-scaling": _ROPE_FLAGS,
    "--rotary-scaling-factor": [*_ROPE_FLAGS, "--rotary-scaling", "linear"],
    "--rope-scaling-factor": [*_ROPE_FLAGS, "--rotary-scaling", "linear"],
    "--rotary-low-frequency-factor": [*_ROPE_FLAGS, "--rotary-scaling", "llama3"],
    "--rotary-high-frequency-factor": [*_ROPE_FLAGS, "--rotary-scaling", "llama3"],
    "--rotary-original-positions": [*_ROPE_FLAGS, "--rotary-scaling", "llama3"],
    "--rotary-beta-fast": _YARN_FLAGS,
    "--rotary-beta-slow": _YARN_FLAGS,
    "--rotary-attention-factor": _YARN_FLAGS,
    "--rotary-percent": _ROPE_FLAGS,
    "--rotary-short-factors": _LONGROPE_FLAGS,
    "--rotary-long-factors": _LONGROPE_FLAGS,
    "--attention-temperature-scale": _ROPE_FLAGS,
    "--attention-temperature-floor": [*_ROPE_FLAGS, "--attention-temperature-scale", "0.1"],
    "--sink-layers": ["--softmax-type", "learnable", "--window-size", "3"],
    "--window-num-query-groups": [*_GROUPED_QUERY_FLAGS, "--num-query-groups", "3", "--window-size", "3"],
    "--no-rope-freq": _ROPE_FLAGS,
    "--rotary-interleaved": _ROPE_FLAGS,
    "--no-rotary-truncate": _YARN_FLAGS,
    "--qk-norm-order": [*_ROPE_FLAGS, "--qk-norm", "head"],
    "--activation-func-clamp-value": ["--activation", "gated-silu"],
    "--glu-linear-offset": ["--activation", "gated-silu"],
    "--rotary-local-base": [*_ROPE_FLAGS, "--window-size", "3"],
    "--alibi-bias-max": ["--position-embedding-type", "alibi"],
    "--window-attn-skip-freq": ["--window-size", "3"],
    "--reset-position-ids": _ROPE_FLAGS,
    "--no-extra-token": ["--data-order", "megatron"],
}
FAMILY_REQUIRED_FLAGS = {
    "gpt2": _DECODER_REQUIRED_FLAGS,
    "mpt": {**_DECODER_REQUIRED_FLAGS, "--layout-independent-dropout": ["--hidden-dropout", "0.1"]},
    "bert": {"--max-position-embeddings": ["--seq-length", "5"]},
    "llama": {
        **_DECODER_REQUIRED_FLAGS,
        "--layout-independent-dropout": ["--hidden-dropout", "0.1"],
        "--no-norm-bias": ["--normalization", "LayerNorm"],
    },
    "t5": {
        "--max-position-embeddings": ["--position-embedding-type", "learned", "--enc-seq-length", "5"],
        "--init-method-std": ["--position-embedding-type", "learned"],
        "--dec-seq-length": ["--enc-seq-length", "6"],
        "--decoder-seq-length": ["--enc-seq-length", "6"],
        "--relative-attention-max-distance": ["--relative-attention-num-buckets", "4"],
        "--pipeline-split-rank": ["--pipe-parallel-size", "2"],
        "--pipeline-model-parallel-split-rank": ["--pipe-parallel-size", "2"],
    },
}
"""Flags beside which another acts, in all families and in one."""
COMMON_FLAGS = """
--calculate-per-token-loss --check-for-nan-in-loss-and-grad --no-check-for-nan-in-loss-and-grad --log-num-zeros-in-grad
--recompute-modules --no-create-attention-mask-in-dataloader --num-dataset-builder-threads --add-qkv-bias
--dist-ckpt-strictness --no-mmap-bin-files --sft --moe-router-dtype --use-precision-aware-optimizer --ckpt-step
--enable-cuda-graph --manual-gc --no-rope-fusion --exit-duration-in-mins --data-args-path --log-straggler
--hybrid-override-pattern --cache-mla-latents --ds_fused_adam --no-bias-swiglu-fusion --spec
"""
"""Flags that stand in people's scripts for Megatron-LM and Megatron-DeepSpeed, of every concern."""
SHARED_OPTION_FLAGS = (
    "--untie-embeddings-and-output-weights",
    "--tie-embeddings-and-output-weights",
    "--cpu_torch_adam",
    "--position-embedding-type",
    "--use-rotary-position-embeddings",
    "--normalization",
    "--no-norm-bias",
    "--overlap-grad-reduce",
    "--disable-bias-linear",
    "--muon-nesterov",
    "--muon-use-nesterov",
    "--muon-split-qkv",
)

FILE_OPTIONS = (
    "vocab_file", "merge_file", "tokenizer_path", "deepspeed_config", "config", "sft", "valid_sft", "chat_template",
    "eval_tasks", "exclude",
)  # fmt: skip
"""Options whose value is a file that is there."""


def sample_value(option, folder: Path, family: str = "gpt2") -> str:
    """Return a good value that is not the default."""
    if option.name == "activation":
        return "gated-gelu"
    if option.name == "position_embedding_type":
        return "learned" if family == "t5" else "rope"
    if option.choices:
        return next((choice for choice in option.choices if choice != option.default), option.choices[0])
    values = {
        "architecture": "qwen3",
        "partition_method": "uniform",
        "data_path": "none",
        "mixture_schedule": "1e9: 0.5 0.5",
        "rampup_batch_size": "2 2 100",
        "step_batch_size_schedule": "0:4 1000:8",
        "iterations_to_skip": "5 101-200",
        "seq_length_schedule": "0: 64; 1e9: 256",
        "seq_length_curriculum": "fixed_discrete min_difficulty=8 max_difficulty=64 difficulty=8,64 max_step=5",
        "denoisers": "R,S",
        "mean_span_length": "4",
        "pipeline_split_rank": "1",
        "pipeline_layout": "Et|tL",
        "pipeline_auto_schedules": "1f1b,zb-h1",
        "rotary_base": "500000",
        "rotary_scaling_factor": "2",
        "rotary_beta_fast": "16",
        "rotary_percent": "0.5",
        "rotary_local_base": "5000",
        "window_attn_skip_freq": "2",
        "no_rope_freq": "2",
        "linear_attention_freq": "2",
        "hybrid_layer_pattern": "*-",
        "branch_multipliers": "mlp-output=0.5",
        "rotary_short_factors": "[1.0,1.5]",
        "rotary_long_factors": "[1.0,1.5]",
        "mtp_num_layers": "2",
        "num_experts": "4",
        "moe_layer_freq": "2",
        "moe_router_topk": "3",
        "moe_router_num_groups": "4",
        "moe_router_group_topk": "2",
        "moe_expert_capacity_factor": "0.5",
        "moe_aux_loss_coeff": "0.1",
        "moe_z_loss_coeff": "0.1",
        "expert_model_parallel_size": "2",
        "hierarchical_context_parallel_sizes": "2 2",
        "rotary_high_frequency_factor": "8",
        "zero_stage": "1",
        "lr_step_offset": "-1",
        "lr_warmup_init": "1e-5",
        "stage3_prefetch_bucket_size": "0",
        "debug_dump_steps": "2,5-7",
        "profile": "2-3",
        "lr_by_name": "layers.*=0.4",
        "weight_decay_by_name": "layers.*=0.4",
        "device": "cpu",
        "save_remote": "memory://b/run",
    }
    if option.name in values:
        return values[option.name]
    if option.name == "pipeline_schedule_file":
        (folder / "order.csv").write_text("0F0,0B0\n1F0,1B0\n")
        return str(folder / "order.csv")
    if option.name == "callback":
        (folder / "callbacks.py").write_text("class Named: ...\n")
        return f"{folder / 'callbacks.py'}:Named"
    if option.name in FILE_OPTIONS:
        (folder / "file.json").write_text("{}")
        return str(folder / "file.json")
    if option.value_type == "str":
        return "9,0,1"
    if option.name in ("pipe_parallel_size", "model_parallel_size", "context_parallel_size", "global_batch_size"):
        return "2"
    return "6" if option.value_type == "int" else "0.4"


def option_default(option, family: str):
    """Return what ``option`` is in ``family`` where nothing is said."""
    return FAMILIES[family].config.DEFAULTS.get(option.name, option.default)


def test_every_cpm_flag_is_classified():
    assert len(CPM_FLAGS) == len(set(CPM_FLAGS)) == 112
    for flag in CPM_FLAGS:
        assert flags_doc.classify(flag)[1]


def test_common_flags_are_classified():
    for flag in COMMON_FLAGS.split():
        assert flags_doc.classify(flag)[1], flag


def test_table_is_sorted_without_duplicates():
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:]
    flags = [line.split("\t")[0] for line in lines]
    assert flags == sorted(flags, key=lambda flag: (flag.lower(), flag)) and len(flags) == len(foreign_flags())
    assert not set(flags) & set(OPTIONS_BY_FLAG)


@pytest.mark.parametrize("rule", [IGNORED, BY_VALUE, DENSE_ONLY, CONVERTED, REJECTED])
def test_rows_of_rule_fill_required_columns(rule: str):
    rows = list(flags_with_rule(rule))
    assert rows
    for row in rows:
        assert row.programs and set(row.programs) <= set(flags_doc.PROGRAMS), row
        assert row.value in ("", "int", "float", "str", "bool", "str*", "any") and row.note, row
        assert bool(row.target) == (rule in (BY_VALUE, CONVERTED)), row
        assert bool(row.alternative) == (rule == BY_VALUE) or rule == CONVERTED, row


def test_every_row_has_a_known_rule():
    assert len(list(flags_with_rule(IGNORED, BY_VALUE, DENSE_ONLY, CONVERTED, REJECTED))) == len(foreign_flags())


def test_targets_name_existing_fields_and_conversions():
    targets = [target for row in flags_with_rule(CONVERTED) for target in row.targets]
    assert {field for target in targets for field in target.fields} <= {
        option.name for option in OPTIONS_BY_FLAG.values()
    }
    functions = {target.function for target in targets} - {""}
    assert functions == {*translate.CONVERSIONS, *translate.DEFERRED_CONVERSIONS}
    constants = [target for target in targets if target.value and not target.function]
    options = {option.name: option for option in OPTIONS_BY_FLAG.values()}
    for target in constants:
        values = target.choices.values() or [translate._parse_constant(target)]
        assert [options[target.fields[0]].problem(value) for value in values] == [None] * len(values), target


def test_flags_named_in_notes_exist():
    reasons = [
        *(text for row in foreign_flags().values() for text in (row.note, row.alternative)),
        *(reason for family in FAMILIES.values() for reason in family.config.REJECTED_FLAGS.values()),
    ]
    named_flags = {flag for reason in reasons for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", reason)}
    assert named_flags - set(OPTIONS_BY_FLAG) - set(foreign_flags()) == {"--max-restarts"}  # the launcher's


@functools.cache
def default_namespace(family: str) -> argparse.Namespace:
    """Return what every option is where nothing is given."""
    return parse([], world_size=1, env={}, family=family).namespace()


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_flag_changes_field(family, tmp_path, monkeypatch, pytestconfig):
    """The short run tests every flag with GPT-2, and with other families those that differ from GPT-2's."""
    for name in ("wandb", "swanlab", "mlflow", "lm_eval"):  # they need not be installed
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    is_full_run = family == "gpt2" or pytestconfig.getoption("--all")
    differing_names = {*FAMILIES[family].config.DEFAULTS} | {option.name for option in family_options(family)} - {
        option.name for option in family_options("gpt2")
    }
    options = [option for option in family_options(family) if is_full_run or option.name in differing_names]
    flags = {flag for option in options for flag in option.flags} - set(UNSUPPORTED_IN_T5 if family == "t5" else ())
    flags -= {"--fp8-format"} if family in ("t5", "bert") else set()  # rejected outside decoders
    check_rows(sorted(flags), lambda flag: check_flag_changes_field(family, flag, tmp_path))


def check_flag_changes_field(family: str, flag: str, folder: Path) -> None:
    option = OPTIONS_BY_FLAG[flag]
    takes_value = option.value_type != "bool" and flag not in option.constants
    words = [flag, sample_value(option, folder, family)] if takes_value else [flag]
    world_size = 6 if option.name == "pipe_parallel_size" else 2
    words += ["--batch-size", "3"] if option.name == "requested_global_batch_size" else []
    words += ["--hidden-size", "16", "--num-attention-heads", "4"] if option.name == "model_parallel_size" else []
    if option.name == "requested_global_batch_size":
        world_size = 1
    words += REQUIRED_FLAGS.get(flag, []) + FAMILY_REQUIRED_FLAGS.get(family, FAMILY_REQUIRED_FLAGS["mpt"]).get(
        flag, []
    )
    config = parse(words, world_size=world_size, env={}, family=family, accepts_model=flag == "--model")
    before, after = (getattr(namespace, option.name) for namespace in (default_namespace(family), config.namespace()))
    is_default = flag in SHARED_OPTION_FLAGS and after == option_default(
        option, family
    )  # another flag of the option changes it
    assert after != before or is_default or option.name == "data_impl"
    assert option.name in config.explicit_fields


def flag_words(row: ForeignFlag) -> list[str]:
    """Return the row's flag with an accepted value, if it takes one."""
    accepted_values = row.target.split() if row.rule == BY_VALUE else ["3"]
    return [row.flag, *(accepted_values[:1] if row.value else [])]


def test_ignored_flags_are_listed_and_strict_flags_rejects_them():
    for words in (
        [word for row in IGNORED_ROWS for word in flag_words(row)],
        [word for row in IGNORED_ROWS for word in ["=".join(flag_words(row))]],
    ):
        config = parse(words, world_size=1, env={})
        assert [name.split()[0] for name in config.ignored] == [row.flag for row in IGNORED_ROWS]
        assert list(config.ignored.values()) == [row.note for row in IGNORED_ROWS]
        with pytest.raises(ConfigError) as exc_info:
            parse([*words, "--strict-flags"], world_size=1, env={})
        assert str(exc_info.value).count("is rejected by --strict-flags") == len(IGNORED_ROWS)


def test_ignored_flag_checks_number_of_values():
    rows = [row for row in IGNORED_ROWS if row.value != "any"]
    for row in rows[::8]:  # 12 ms each; the rule reads the column
        words, message = ([row.flag, "3"], "takes no value") if not row.value else ([row.flag], "needs a value")
        with pytest.raises(ConfigError, match=f"^{row.flag} {message}"):
            parse(words, world_size=1, env={})


def test_unsupported_value_error_has_advice():
    rows = list(flags_with_rule(BY_VALUE))
    assert len(rows) > 10
    for row in rows:
        with pytest.raises(ConfigError) as exc_info:
            parse([row.flag, "7"], world_size=1, env={})
        assert str(exc_info.value) == f"{row.flag} 7 is not supported: {row.alternative}"


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_flag_error_has_reason(family, pytestconfig):
    """In all three spellings; the short run tests one spelling of each flag in turn."""
    is_full_run = pytestconfig.getoption("--all")
    for flag_idx, (flag, reason) in enumerate(rejected_flags(family).items()):
        spellings = ([flag], [flag, "3"], [f"{flag}=3"])
        for words in spellings if is_full_run else spellings[flag_idx % 3 :][:1]:
            with pytest.raises(ConfigError) as exc_info:
                parse(words, world_size=1, env={}, family=family)
            assert str(exc_info.value) == f"{flag} is not supported: {reason}"


def test_family_rejects_unsupported_and_foreign_flags():
    for name, family in FAMILIES.items():
        other_family_flags = set(OPTIONS_BY_FLAG) - {flag for option in family_options(name) for flag in option.flags}
        other_family_flags -= set(family.config.ALWAYS_ON_FLAGS)
        assert set(rejected_flags(name)) == {row.flag for row in flags_with_rule(REJECTED)} | other_family_flags | set(
            family.config.REJECTED_FLAGS
        )
        assert set(family.config.REJECTED_FLAGS) <= set(foreign_flags()) | set(OPTIONS_BY_FLAG)
        assert all(family.advice(OPTIONS_BY_FLAG[flag]) for flag in other_family_flags)


def test_advice_covers_inactive_fields_only():
    fields = {option.name for _, option in all_options()}
    for name, family in FAMILIES.items():
        active_fields = {option.name for option in family_options(name)}
        assert set(family.config.ADVICE) <= fields - active_fields


def test_generated_flag_docs_are_up_to_date():
    assert (DOCS / "flags.md").read_text(encoding="utf-8") == flags_doc.text(), (
        "docs/flags.md is outdated: run python -m megatron.arguments.flags_doc > docs/flags.md"
    )
    assert (DOCS / "other_flags.md").read_text(encoding="utf-8") == flags_doc.other_text(), (
        "docs/other_flags.md is outdated: run python -m megatron.arguments.flags_doc other > docs/other_flags.md"
    )


@pytest.mark.parametrize("flags", ["--moe-latent-size 8", "--moe-input-jitter-eps 0.1"])
def test_dense_only_flag_with_experts_raises(flags: str):
    assert list(parse(flags.split(), world_size=1, env={}).ignored) == flags.split()[:1]
    with pytest.raises(
        ConfigError, match=f"^not supported with --num-experts, since the results would change: {flags.split()[0]}"
    ):
        parse([*flags.split(), "--num-experts", "4"], world_size=1, env={})


def test_foreign_flag_table_is_loaded_on_demand(monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise AssertionError("the table was read")

    for module in ("flag_values", "translate", "related_fields", "config_file"):
        monkeypatch.setattr(f"megatron.arguments.{module}.foreign_flags", fail)
    parse(["--num-layers", "2", "--lr", "0.1"], world_size=1, env={})
    with pytest.raises(SystemExit):
        parse(["--help-all"], world_size=1, env={})

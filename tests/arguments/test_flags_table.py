"""Every flag of CPM-Pretrain and Megatron-LM is honoured, an alias, neutral, converted, or refused; none is silent."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron.arguments import flags_doc
from megatron.arguments.flag_values import all_options, options_in, refusals
from megatron.arguments.megatron_flags import CONVERTED_ROWS, CPM_FLAGS, NEUTRAL_ROWS, REFUSED_FLAGS, REFUSED_ROWS, ROWS
from megatron.config import OptimizerConfig, parse
from megatron.config.option import options_of
from megatron.errors import ConfigError
from megatron.models.registry import FAMILIES

DOCUMENT = Path(__file__).parents[2] / "docs" / "flags.md"
OURS = {flag: option for _, option in all_options() for flag in option.flags}
ACTING = [
    (name, flag)
    for name in FAMILIES
    for option in options_in(name)
    for flag in option.flags
    if (name, flag)
    not in (
        ("t5", "--use-rotary-position-embeddings"),  # another value of a flag of T5's, which has it not
        ("t5", "--context-parallel-size"),  # 1 alone; tests/arguments/test_context_parallel.py
        ("t5", "--pipeline-model-parallel-layout"),  # of one stack of layers; tests/config/test_pipeline_layout.py
    )
]
NEEDS = {
    **dict.fromkeys(
        ("--checkpoint-num-layers", "--recompute-num-layers", "--activations-checkpoint-num-layers"),
        ["--checkpoint-activations"],
    ),
    **dict.fromkeys(("--cpu-adam", "--cpu_torch_adam", "--no-pin-memory"), ["--offload-optimizer"]),
    **dict.fromkeys(("--offload-parameters", "--offload-param"), ["--zero-stage", "3"]),
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
        for optimizer in ("muon", "sgd")
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
    "--rampup-batch-size": ["--batch-size", "1", "--gas", "8"],
    **{
        flag: ["--train-iters", "0", "--eval-iters", "0", "--dry-run"]
        for flag in ("--train-data-path", "--valid-data-path", "--test-data-path")
    },
}
_ROPE = ["--position-embedding-type", "rope"]
_YARN = [*_ROPE, "--rotary-scaling", "yarn"]
_GROUPED = ["--num-attention-heads", "6", "--hidden-size", "12"]
_EXPERTS = ["--num-experts", "8"]
_SIGMOID = [*_EXPERTS, "--moe-router-score-function", "sigmoid"]
_DECODER = {
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
        ),
        _EXPERTS,
    ),
    "--moe-router-num-groups": [*_EXPERTS, "--moe-router-group-topk", "1"],
    "--moe-router-group-topk": [*_EXPERTS, "--moe-router-num-groups", "4"],
    "--moe-router-load-balancing-type": [*_EXPERTS, "--moe-aux-loss-coeff", "0.1"],
    "--moe-token-drop-policy": [*_EXPERTS, "--moe-expert-capacity-factor", "0.5"],
    "--moe-router-enable-expert-bias": _SIGMOID,
    "--moe-router-bias-update-rate": _SIGMOID,
    "--moe-shared-expert-gate": [*_EXPERTS, "--moe-shared-expert-intermediate-size", "8"],
    "--max-position-embeddings": ["--seq-length", "5"],
    "--num-query-groups": _GROUPED,
    "--num-key-value-heads": _GROUPED,
    "--rotary-base": _ROPE,
    "--rope-theta": _ROPE,
    "--rotary-position-embeddings-theta": _ROPE,
    "--rotary-scaling": _ROPE,
    "--rotary-scaling-factor": [*_ROPE, "--rotary-scaling", "linear"],
    "--rope-scaling-factor": [*_ROPE, "--rotary-scaling", "linear"],
    "--rotary-low-frequency-factor": [*_ROPE, "--rotary-scaling", "llama3"],
    "--rotary-high-frequency-factor": [*_ROPE, "--rotary-scaling", "llama3"],
    "--rotary-original-positions": [*_ROPE, "--rotary-scaling", "llama3"],
    "--rotary-beta-fast": _YARN,
    "--rotary-beta-slow": _YARN,
    "--rotary-attention-factor": _YARN,
    "--rotary-percent": _ROPE,
    "--rotary-local-base": [*_ROPE, "--window-size", "3"],
    "--alibi-bias-max": ["--position-embedding-type", "alibi"],
    "--window-attn-skip-freq": ["--window-size", "3"],
    "--reset-position-ids": _ROPE,
}
NEEDS_IN = {
    "gpt2": _DECODER,
    "mpt": {**_DECODER, "--layout-independent-dropout": ["--hidden-dropout", "0.1"]},
    "bert": {"--max-position-embeddings": ["--seq-length", "5"]},
    "llama": {
        **_DECODER,
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
ASKED = """
--calculate-per-token-loss --check-for-nan-in-loss-and-grad --no-check-for-nan-in-loss-and-grad --log-num-zeros-in-grad
--recompute-modules --no-create-attention-mask-in-dataloader --num-dataset-builder-threads --add-qkv-bias
--dist-ckpt-strictness --no-mmap-bin-files --sft --moe-router-dtype --use-precision-aware-optimizer --ckpt-step
--enable-cuda-graph --manual-gc --no-rope-fusion --exit-duration-in-mins --data-args-path --log-straggler
--hybrid-override-pattern --multi-latent-attention --ds_fused_adam --no-bias-swiglu-fusion --spec
"""
"""Flags that stand in people's scripts for Megatron-LM and Megatron-DeepSpeed, of every concern."""
TIES = (
    "--untie-embeddings-and-output-weights",
    "--tie-embeddings-and-output-weights",
    "--cpu_torch_adam",
    "--position-embedding-type",
    "--use-rotary-position-embeddings",
    "--normalization",
    "--no-norm-bias",
    "--overlap-grad-reduce",
    "--no-gradient-accumulation-fusion",
    "--disable-bias-linear",
    "--muon-nesterov",
    "--muon-use-nesterov",
    "--muon-split-qkv",
)

FILES = (
    "vocab_file", "merge_file", "tokenizer_path", "deepspeed_config", "config", "sft", "valid_sft", "chat_template",
    "eval_tasks",
)  # fmt: skip
"""Options whose value is a file that is there."""


def some_value(option, folder: Path, family: str = "gpt2") -> str:
    """Return a good value that is not the default."""
    if option.name == "activation":
        return "gated-gelu"
    if option.name == "position_embedding_type":
        return "learned" if family == "t5" else "rope"
    if option.choices:
        return next((choice for choice in option.choices if choice != option.default), option.choices[0])
    chosen = {
        "partition_method": "uniform",
        "data_path": "none",
        "mixture_schedule": "1e9: 0.5 0.5",
        "rampup_batch_size": "2 2 100",
        "seq_length_schedule": "0: 64; 1e9: 256",
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
        "num_experts": "4",
        "moe_layer_freq": "2",
        "moe_router_topk": "3",
        "moe_router_num_groups": "4",
        "moe_router_group_topk": "2",
        "moe_expert_capacity_factor": "0.5",
        "moe_aux_loss_coeff": "0.1",
        "moe_z_loss_coeff": "0.1",
        "expert_model_parallel_size": "2",
        "rotary_high_frequency_factor": "8",
        "zero_stage": "1",
        "stage3_prefetch_bucket_size": "0",
        "debug_dump_steps": "2,5-7",
        "profile": "2-3",
        "lr_by_name": "layers.*=0.4",
        "weight_decay_by_name": "layers.*=0.4",
        "device": "cpu",
        "save_remote": "memory://b/run",
    }
    if option.name in chosen:
        return chosen[option.name]
    if option.name == "pipeline_schedule_file":
        (folder / "order.csv").write_text("0F0,0B0\n1F0,1B0\n")
        return str(folder / "order.csv")
    if option.name in FILES:
        (folder / "file.json").write_text("{}")
        return str(folder / "file.json")
    if option.kind == "str":
        return "9,0,1"
    if option.name in ("pipe_parallel_size", "model_parallel_size", "context_parallel_size", "global_batch_size"):
        return "2"
    return "6" if option.kind == "int" else "0.4"


def option_default(option, family: str):
    """Return what ``option`` is in ``family`` where nothing is said."""
    return FAMILIES[family].config.DEFAULTS.get(option.name, option.default)


def test_no_flag_of_cpm_is_forgotten():
    assert len(CPM_FLAGS) == len(set(CPM_FLAGS)) == 112
    for flag in CPM_FLAGS:
        assert flags_doc.classify(flag)[1]


def test_no_flag_that_people_use_is_unknown():
    for flag in ASKED.split():
        assert flags_doc.classify(flag)[1], flag


def test_a_flag_has_one_row():
    listed = [row.flag for row in (*NEUTRAL_ROWS, *CONVERTED_ROWS, *REFUSED_ROWS)]
    assert len(listed) == len(set(listed)) == len(ROWS)
    assert not set(listed) & set(OURS)


def test_what_to_use_instead_is_there():
    """Of every flag that a reason names."""
    reasons = [
        *(text for row in ROWS.values() for text in (row.about, row.otherwise)),
        *(why for family in FAMILIES.values() for why in family.config.REFUSED.values()),
    ]
    named = {flag for reason in reasons for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", reason)}
    assert named - set(OURS) - set(ROWS) == {"--max-restarts"}  # the launcher's
    assert {flag for row in CONVERTED_ROWS for flag in row.fields} <= {option.name for option in OURS.values()}


@functools.cache
def without_flags(family: str) -> argparse.Namespace:
    """Return what every option is where nothing is given."""
    return parse([], world_size=1, env={}, family=family).namespace()


@pytest.mark.parametrize(("family", "flag"), ACTING)
def test_an_honoured_flag_changes_its_field(family, flag, tmp_path, monkeypatch):
    for name in ("wandb", "lm_eval"):  # they need not be installed
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    option = OURS[flag]
    takes_value = option.kind != "bool" and flag not in option.constants
    words = [flag, some_value(option, tmp_path, family)] if takes_value else [flag]
    world_size = 6 if option.name == "pipe_parallel_size" else 2
    words += ["--batch-size", "3"] if option.name == "requested_global_batch_size" else []
    words += ["--hidden-size", "16", "--num-attention-heads", "4"] if option.name == "model_parallel_size" else []
    if option.name == "requested_global_batch_size":
        world_size = 1
    words += NEEDS.get(flag, []) + NEEDS_IN.get(family, NEEDS_IN["mpt"]).get(flag, [])
    config = parse(words, world_size=world_size, env={}, family=family)
    before, after = (getattr(each, option.name) for each in (without_flags(family), config.namespace()))
    is_so = flag in TIES and after == option_default(option, family)  # another flag of the option changes it
    assert after != before or is_so or option.name == "data_impl"
    assert option.name in config.given


def words_of(row) -> list[str]:
    """Return the row's flag with a value that asks for what holds, where it takes one."""
    return [row.flag, *([row.holds[0] if row.holds else "3"] if row.num_values else [])]


def test_what_is_neutral_is_accepted_and_named_unless_flags_are_strict():
    for words in (
        [word for row in NEUTRAL_ROWS for word in words_of(row)],
        [word for row in NEUTRAL_ROWS for word in ["=".join(words_of(row))]],
    ):
        config = parse(words, world_size=1, env={})
        assert [name.split()[0] for name in config.ignored] == [row.flag for row in NEUTRAL_ROWS]
        assert list(config.ignored.values()) == [row.about for row in NEUTRAL_ROWS]
        with pytest.raises(ConfigError) as caught:
            parse([*words, "--strict-flags"], world_size=1, env={})
        assert str(caught.value).count("is refused by --strict-flags") == len(NEUTRAL_ROWS)


def test_a_neutral_flag_takes_as_many_values_as_its_row_says():
    for row in NEUTRAL_ROWS:
        words, message = ([row.flag, "3"], "takes no value") if row.num_values == 0 else ([row.flag], "needs a value")
        with pytest.raises(ConfigError, match=f"^{row.flag} {message}"):
            parse(words, world_size=1, env={})


def test_other_values_of_a_neutral_flag_are_refused_with_the_way_out():
    held = [row for row in NEUTRAL_ROWS if row.holds]
    assert len(held) > 10
    for row in held:
        with pytest.raises(ConfigError) as caught:
            parse([row.flag, "7"], world_size=1, env={})
        assert str(caught.value) == f"{row.flag} 7 is refused: {row.otherwise}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_refused_flag_ends_the_start_with_its_reason(family, pytestconfig):
    """However it is written; in the short run each in one way by turns, but for GPT-2's."""
    is_whole = family == "gpt2" or pytestconfig.getoption("--all")
    for number, (flag, reason) in enumerate(refusals(family).items()):
        ways = ([flag], [flag, "3"], [f"{flag}=3"])
        for words in ways if is_whole else ways[number % 3 :][:1]:
            with pytest.raises(ConfigError) as caught:
                parse(words, world_size=1, env={}, family=family)
            assert str(caught.value) == f"{flag} is refused: {reason}"


def test_a_family_refuses_its_own_list_and_what_acts_in_the_other_only():
    for name, family in FAMILIES.items():
        foreign = set(OURS) - {flag for option in options_in(name) for flag in option.flags}
        foreign -= set(family.config.HOLDS)
        assert set(refusals(name)) == set(REFUSED_FLAGS) | foreign | set(family.config.REFUSED)
        assert set(family.config.REFUSED) <= set(ROWS) | set(OURS)
        assert all(family.advice(OURS[flag]) for flag in foreign)


def test_advice_is_of_flags_that_do_not_act():
    fields = {option.name for _, option in all_options()}
    for name, family in FAMILIES.items():
        acting = {option.name for option in options_in(name)}
        assert set(family.config.ADVICE) <= fields - acting


def test_the_document_is_what_the_table_says():
    assert DOCUMENT.read_text(encoding="utf-8") == flags_doc.text(), (
        "docs/flags.md is old: run python -m megatron.arguments.flags_doc > docs/flags.md"
    )

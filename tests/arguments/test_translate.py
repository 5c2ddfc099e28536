"""What other trainers' flags become, and what their programs are where a script is silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.arguments.other_programs import BERT, GPT, PROGRAMS
from megatron.arguments.parser import parse
from megatron.config import Config
from megatron.errors import ConfigError

MEGATRON_DEFAULTS = {"gpt2": GPT, "bert": BERT, "t5": None, "llama": None}


def parse_line(line: str, family: str = "gpt2", *, is_megatron: bool = False, world_size: int = 1) -> Config:
    defaults = MEGATRON_DEFAULTS[family] if is_megatron else None
    return parse(line.split(), world_size=world_size, env={}, family=family, defaults=defaults)


def get_value(config: Config, name: str) -> object:
    return getattr(config.namespace(), name)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("--optimizer adam", {"optimizer": "adamw"}),
        ("--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt", {"lr_decay_style": "wsd"}),
        ("--initial-loss-scale 4096 --fp16", {"initial_scale_power": 12}),
        ("--min-loss-scale 2 --fp16", {"min_scale": 2.0}),
        ("--distributed-timeout-minutes 2", {"step_timeout": 120}),
        ("--exit-duration-in-secs 90", {"exit_duration_in_mins": 1.5}),
        ("--swiglu --hidden-size 300", {"activation": "gated-silu", "ff_hidden_size": 768}),
        ("--swiglu --hidden-size 300 --ffn-hidden-size 100", {"activation": "gated-silu", "ff_hidden_size": 100}),
        ("--glu-activation swiglu", {"activation": "gated-silu"}),
        ("--bias-gelu-fusion", {"activation": "gelu-tanh"}),
        ("--pad-vocab-size-to 1024", {"vocab_size": 1024}),
        ("--use-distributed-optimizer", {"zero_stage": 1}),
        ("--use-distributed-optimizer --zero-stage 2", {"zero_stage": 2}),
        ("--use-torch-fsdp2", {"zero_stage": 3}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero_stage": 2}),
        ("--use-megatron-fsdp --use-distributed-optimizer", {"zero_stage": 1}),
        ("--zero-stage 3 --remote-device cpu", {"offload_parameters": True}),
        ("--remote-device none", {"offload_parameters": False}),
        ("--optimizer-cpu-offload", {"offload_optimizer": True}),
        ("--activations-checkpoint-method uniform", {"checkpoint_activations": True}),
        ("--activations-checkpoint-granularity selective", {"recompute_granularity": "selective"}),
        ("--mock-data", {"data_path": "mock"}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
        ("--position-embedding-type rope --use-rope-scaling", {"rotary_scaling": "llama3"}),
        (
            "--position-embedding-type rotary --rotary-seq-len-interpolation-factor 3",
            {"position_embedding_type": "rope", "rotary_scaling": "linear", "rotary_scaling_factor": 3.0},
        ),
        ("--no-position-embedding", {"position_embedding_type": "none"}),
        ("--no-position-embedding --use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        ("--normalization rmsnorm", {"normalization": "RMSNorm"}),
        ("--hidden-bias --add-qkv-bias", {"hidden_bias": True, "add_qkv_bias": False}),
        ("--fim-data", {"fim_rate": 0.5}),
        ("--profile --profile-step-start 4 --profile-step-end 6", {"profile": "5-6"}),
        ("--profile", {"profile": "11-12"}),
        ("--profile-step-start 4 --profile-step-end 6", {"profile": None}),
        ("--skip-train --train-iters 5", {"train_iters": 0}),
        ("--skip-train --load x", {"eval_only": True}),
        ("--skip-train --resume", {"eval_only": True}),
        ("--ds-sequence-parallel-size 2", {"context_parallel_size": 2, "cp_comm_type": "a2a"}),
        ("--ds-sequence-parallel-size 1", {"context_parallel_size": 1, "cp_comm_type": "all_gather"}),
        ("--save-retain-interval 50", {"keep_every": 50, "keep_last": 1}),
        ("--split '99,1,0'", {"split": "99,1,0"}),
        ("--no-mmap-bin-files", {"data_impl": "pread"}),
        ("--tokenizer-type GPTSentencePieceTokenizer", {"tokenizer_type": "SentencePiece"}),
        ("--enable-zbh1-pipeline --pipe-parallel-size 2", {"pipeline_schedule": "zb-h1"}),
        ("--num-layers 1_0", {"num_layers": 10}),
        ("--global-batch-size 8 --eval-iters 3 --eval-global-batch-size 24", {"eval_iters": 9}),
        ("--global-batch-size 8 --eval-iters 6 --eval-global-batch-size 4", {"eval_iters": 3}),
    ],
)
def test_foreign_flag_form_sets_field(line: str, fields: dict[str, object]) -> None:
    config = parse_line(line, world_size=2)
    assert {name: get_value(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--initial-loss-scale 1000 --fp16", "--initial-loss-scale must be a power of 2, got 1000"),
        ("--swiglu --activation relu", "--swiglu must agree with --activation relu"),
        ("--glu-activation geglu", "--glu-activation must be one of swiglu, got 'geglu'; use --activation gated-gelu"),
        ("--no-pipeline-parallel --pipe-parallel-size 2", "--no-pipeline-parallel needs one stage"),
        (
            "--num-unique-layers 2 --num-layers 4",
            "must equal --num-layers, because layers do not share weights, got 2 and 4",
        ),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy all", "must be one of no_shard, .*, got 'all'"),
        ("--mock-data --data-path x", "--mock-data must agree with --data-path x"),
        (
            "--ds-sequence-parallel-size 2 --cp-comm-type p2p",
            "--ds-sequence-parallel-size 2 must agree with --cp-comm-type",
        ),
        ("--ds-sequence-parallel-size 2 --seq-length 258", r"\(--context-parallel-size was given as --ds-seq.* 2\)"),
        ("--skip-train --load x --eval-iters 0", r"--eval-iters 0.*\(--eval-only was given as --skip-train\)"),
        (
            "--lr-decay-style wsd --lr-wsd-decay-iters 5 --lr-wsd-decay-samples 21",
            "got 5 steps, which are .* and 21 samples",
        ),
        ("--remote-device nvme", "--remote-device must be none or cpu, got 'nvme'"),
        ("--data-args-path /nowhere", "--data-args-path must name a text file that can be read, got /nowhere"),
        ("--profile x --profile-step-start 4", "--profile-step-start must agree with --profile"),
        (
            "--global-batch-size 8 --eval-iters 3 --eval-global-batch-size 4",
            "got 3 x 4 = 12 and 8. Change --eval-iters",
        ),
        ("--ds-sequence-parallel-fpdt --activation gelu-tanh --hidden-dropout 0.1", "got --hidden-dropout 0.1 and"),
        ("--ds-sequence-parallel-fpdt --hidden-dropout 0", "which its layers compute .* and --activation gelu. Change"),
        ("--spec my.layers my_spec", "--spec my.layers my_spec is not supported: --hybrid-layer-pattern and"),
    ],
)
def test_unconvertible_foreign_flags_raise(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_line(line, world_size=2)


def test_evaluation_in_the_global_batch_size_has_no_effect() -> None:
    schedule = "--step-batch-size-schedule 0:4,1000:8 --batch-size 2"
    config = parse_line(f"{schedule} --eval-iters 3 --eval-global-batch-size 8", world_size=2)
    assert config.batch.eval_iters == 3
    assert config.ignored["--eval-global-batch-size 8"] == "it is the global batch size"


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("bert", "local"),
        ("gpt2", "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"),
        ("gpt2", "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"),
    ],
)
def test_layer_specifications_of_megatron_have_no_effect(family: str, spec: str) -> None:
    assert list(parse_line(f"--spec {spec}", family).ignored) == [f"--spec {spec}"]


def test_chunks_of_sequences_have_no_effect_without_dropout() -> None:
    line = "--ds-sequence-parallel-fpdt --ds-sequence-parallel-size 2 --hidden-dropout 0"
    assert "--ds-sequence-parallel-fpdt" in parse_line(line, is_megatron=True, world_size=2).ignored


EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        (f"--num-layers 6 --pipeline-chunks 2 {EMBEDDING} {LOSS}", "E|t|t|t|t|t|t|L"),
        (f"--num-layers 7 --pipeline-chunks 2 {EMBEDDING}", "E|t|t|t|t|t|t|tL"),
        (f"--num-layers 3 {LOSS}", "Et|t|t|L"),
        (f"--num-layers 8 --pipeline-chunks 2 {EMBEDDING} {LOSS}", None),
    ],
)
def test_counted_embedding_and_loss_split_fewer_layers_than_chunks(flags: str, layout: str | None) -> None:
    config = parse_line(f"{flags} --pipe-parallel-size 4", world_size=4)
    assert config.parallel.pipeline_layout == layout
    assert (EMBEDDING in config.ignored, LOSS in config.ignored) == (layout is None, layout is None)
    if layout:
        assert config.parallel.chunks == len(layout.split("|")) / 4


@pytest.mark.parametrize(
    ("line", "family", "reason"),
    [
        ("--group-query-attention", "t5", "it is supported in decoders only"),
        ("--fim-data", "t5", "T5 already predicts masked spans"),
        ("--use-rope-scaling", "bert", "it is supported in decoders only"),
    ],
)
def test_foreign_flag_of_inactive_field_raises(line: str, family: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line} is not supported: {reason}"):
        parse_line(line, family)


TRAINING_FLAGS = (
    "--save-interval 5", "--async-save", "--rampup-batch-size 2 2 8 --global-batch-size 8", "--num-workers 2",
    "--export-hf-interval 5", "--stability-guard rollback", "--profile --profile-step-start 4 --profile-step-end 6",
    "--debug-nan", "--log-layer-norms", "--pipeline-trace x --pipe-parallel-size 2",
)  # fmt: skip
"""Flags that --eval-only rejects."""
LENGTH_FLAGS = ("--train-samples 80 --lr-warmup-samples 8", "--lr-warmup-iters 30 --train-iters 40 --lr-decay-iters 35")


@pytest.mark.parametrize("load", ["--load x", ""])
@pytest.mark.parametrize("flags", [*TRAINING_FLAGS, *LENGTH_FLAGS])
def test_skip_train_ignores_and_lists_training_flags(flags: str, load: str) -> None:
    line = f"{flags} --skip-train {load} --batch-size 1"
    config = parse_line(line, world_size=2)
    assert config.checkpoint.eval_only == bool(load) and (load or config.batch.train_iters == 0)
    if flags in TRAINING_FLAGS or not load:
        assert flags.split()[0] in " ".join(config.ignored), config.ignored
        with pytest.raises(ConfigError, match=f"{flags.split()[0]}.* is rejected by --strict-flags"):
            parse_line(f"{line} --strict-flags", world_size=2)
    if load and flags in TRAINING_FLAGS:
        with pytest.raises(ConfigError, match="got --eval-only"):
            parse_line(line.replace("--skip-train", "--eval-only"), world_size=2)


def test_skip_train_requires_checkpoint_of_first_run() -> None:
    config = parse_line("--load x --save x --skip-train", is_megatron=True)
    assert config.checkpoint.eval_only and not config.checkpoint.load_if_exists


def test_megatron_programs_use_megatron_defaults() -> None:
    assert PROGRAMS["pretrain_gpt.py"] == ("gpt2", GPT) and PROGRAMS["pretrain_bert.py"] == ("bert", BERT)
    megatron, native = parse_line("", is_megatron=True), parse_line("")
    assert (megatron.model.hidden_bias, megatron.model.activation) == (True, "gelu-tanh")
    assert (megatron.optimizer.lr_decay_style, megatron.optimizer.warmup) == ("linear", 0.0)
    assert (megatron.precision.dtype, megatron.model.make_vocab_size_divisible_by) == ("fp32", 128)
    assert (native.model.hidden_bias, native.model.activation, native.optimizer.warmup) == (False, "gelu", 0.01)
    assert (
        parse_line("--bf16 --openai-gelu --disable-bias-linear --warmup 0.5", is_megatron=True).optimizer.warmup == 0.5
    )
    assert not parse_line("--disable-bias-linear", is_megatron=True).model.hidden_bias
    assert parse_line("--no-bias-gelu-fusion", is_megatron=True).model.activation == "gelu", (
        "as Megatron without its kernel"
    )
    assert parse_line("", "bert", is_megatron=True).data.tokenizer_type == "BertWordPieceLowerCase"


def test_megatron_load_is_optional_on_first_run() -> None:
    assert parse_line("--load x", is_megatron=True).checkpoint.load_if_exists
    assert not parse_line("--load x --exit-on-missing-checkpoint", is_megatron=True).checkpoint.load_if_exists
    assert not parse_line("--load x --finetune", is_megatron=True).checkpoint.load_if_exists
    assert not parse_line("", is_megatron=True).checkpoint.load_if_exists
    assert not parse_line("--load x").checkpoint.load_if_exists


def test_data_args_path_files_set_data_paths(tmp_path: Path) -> None:
    paths_txt, paths_json = tmp_path / "paths.txt", tmp_path / "each.json"
    paths_txt.write_text("0.25 a\n0.75 b\n")
    paths_json.write_text(json.dumps({"train": ["0.5", "a", "0.5", "b"], "valid": ["c"], "test": ["d"]}))
    assert parse_line(f"--data-args-path {paths_txt} --dry-run").data.data_path == "0.25 a 0.75 b"
    data = parse_line(f"--per-split-data-args-path {paths_json} --dry-run").data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == ("0.5 a 0.5 b", "c", "d")


def parse_weighted_splits(*texts: str) -> Config:
    flags = ("--train-weighted-split-paths", "--valid-weighted-split-paths", "--test-weighted-split-paths")
    words = [word for flag, text in zip(flags, texts, strict=False) for word in (flag, text)]
    return parse([*words, "--dry-run"], world_size=1, env={})


def test_consecutive_split_ranges_become_split() -> None:
    data = parse_weighted_splits("train: 0.3 0:0.9 a, 0.7 0:0.9 b", "v: 0.3 0.9:0.95 a, 0.7 0.9:0.95 b").data
    assert (data.data_path, data.split) == ("0.3 a 0.7 b", "18,1,1")
    data = parse_weighted_splits("t: 1 0:1 a, 2 0:1 b", "v: 1 0:1 c").data
    assert (data.train_data_path, data.valid_data_path, data.data_path) == ("1 a 2 b", "1 c", None)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["train 0.3 0:0.9 a"], "must be .NAME: WEIGHT START:END PATH"),
        (["train: 0.3 0:0.9"], "must be .NAME: WEIGHT START:END PATH"),
        (["train: 0.3 0.9:0 a"], "where '0.3 0.9:0 a' is invalid"),
        (["t: 1 0:0.9 a", "v: 1 0.9:1 b"], "of the same corpora"),
        (["t: 1 0:0.9 a", "v: 1 0.8:1 a"], "must use consecutive ranges"),
        (["t: 1 0:1 a", "v: 1 0:1 b, w: 1 0:1 c"], "which has a second group"),
    ],
)
def test_unsupported_weighted_split_paths_raise(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_weighted_splits(*texts)


def parse_with_json(content: object, line: str, folder: Path) -> Config:
    (folder / "ds.json").write_text(json.dumps(content))
    return parse_line(f"{line} --deepspeed_config {folder / 'ds.json'}")


def test_flags_set_optimizer_and_json_sets_loss_scale(tmp_path: Path) -> None:
    """As in Megatron-DeepSpeed, which hands its own optimizer to an engine that scales the loss itself."""
    config = parse_with_json(
        {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}}, "--lr 0.2", tmp_path
    )
    assert config.optimizer.lr == 0.2
    assert {*config.ignored} == {"optimizer.params.lr", "optimizer.params.torch_adam"}
    fp16 = {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 3}}
    config = parse_with_json(fp16, "--fp16 --loss-scale 12 --hysteresis 2", tmp_path)
    assert (config.precision.loss_scale, config.precision.hysteresis) == (0, 3)
    assert {*config.ignored} == {"--loss-scale 12", "--hysteresis 2"}


def test_ineffective_json_sections_are_accepted(tmp_path: Path) -> None:
    content = {
        "bfloat16": {"enabled": "auto"},
        "zero_optimization": {"stage": 1, "cpu_offload": True, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "curriculum_learning": {"enabled": False, "min_difficulty": 8},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": False}},
        "prescale_gradients": True,
    }
    config = parse_with_json(content, "", tmp_path)
    assert (config.optimizer.zero_stage, config.optimizer.offload_optimizer) == (1, True)
    assert {*config.ignored} == {
        "zero_optimization.overlap_comm", "scheduler", "curriculum_learning", "data_efficiency", "prescale_gradients",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"5 problems(.|\n)*scheduler is rejected by --strict-flags"):
        parse_with_json(content, "--strict-flags", tmp_path)

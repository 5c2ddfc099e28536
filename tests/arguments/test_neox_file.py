"""--config with a YAML file of GPT-NeoX: its names, and DeepSpeed's keys next to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.arguments.flag_values import scan
from megatron.arguments.other_programs import GPT
from megatron.config import Config
from megatron.errors import ConfigError

NEOX_YAML = """{
   "pipe_parallel_size": 1, "model_parallel_size": 1,
   "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "max_position_embeddings": 16,
   "norm": "rmsnorm", "rms_norm_epsilon": 1.0e-6, "pos_emb": "rotary", "rotary_pct": 0.5, "no_weight_tying": true,
   "gpt_j_residual": false, "output_layer_parallelism": "column", "attention_config": [[["flash"], 2]],
   "rope_fusion": false, "layernorm_fusion": true,
   "optimizer": {"type": "Adam", "params": {"lr": 0.0002, "betas": [0.9, 0.95], "eps": 1.0e-8,}},
   "zero_optimization": {"stage": 1, "overlap_comm": True},
   "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.5, "min_lr": 0.00002,
   "fp16": {"fp16": true, "enabled": true, "loss_scale": 0, "hysteresis": 2},
   "train_iters": 40, "checkpoint_factor": 7, "keep_last_n_checkpoints": 4,
   "wall_clock_breakdown": true,  # DeepSpeed's
}
"""


def parse_file(text: str, folder: Path, line: str = "") -> Config:
    path = folder / "neox.yml"
    path.write_text(text)
    return parse(["--config", str(path), *line.split()], world_size=2, env={}, defaults=GPT)


def test_neox_names_and_sections_set_fields(tmp_path: Path) -> None:
    config = parse_file(NEOX_YAML, tmp_path)
    model, optimizer = config.model, config.optimizer
    assert (model.normalization, model.layernorm_epsilon, model.untie_embeddings) == ("RMSNorm", 1e-6, True)
    assert (model.position_embedding_type, model.rotary_percent) == ("rope", 0.5)
    assert (optimizer.lr, optimizer.min_lr, optimizer.adam_beta2, optimizer.zero_stage) == (2e-4, 2e-5, 0.95, 1)
    assert (optimizer.clip_grad, config.precision.dtype, config.batch.batch_size) == (0.5, "fp16", 3)
    assert (config.checkpoint.save_interval, config.checkpoint.keep_last, config.batch.train_iters) == (7, 4, 40)
    assert config.deepspeed["wall_clock_breakdown"] is True
    assert {"--output-layer-parallelism", "--attention-config", "--layernorm-fusion", "fp16.fp16"} <= set(
        config.ignored
    )


def test_command_line_overrides_neox_file(tmp_path: Path) -> None:
    config = parse_file(NEOX_YAML, tmp_path, "--lr 0.5 --normalization LayerNorm --keep-last 9")
    assert (config.optimizer.lr, config.model.normalization, config.checkpoint.keep_last) == (0.5, "LayerNorm", 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpt_j_residual: true", "neox.yml:1: --gpt-j-residual is not supported"),
        (
            "init_method: small_init",
            "neox.yml:1: --init-method small_init is not supported: use normal; for",
        ),
        ("output_layer_init_method: wang_init", "use scaled_normal, whose standard deviation is --init-method-std / "),
        ("pos_emb: sinusoidal", "--pos-emb must be one of rotary, learned, alibi, none, got 'sinusoidal'"),
        ("attention_config: [[[local], 2]]", "--attention-config must be global or flash, got local"),
        ("intermediate_size: 64", "use --ff-hidden-size"),
        ("use_bias_in_mlp: false", "must be equal, got true and false (a missing one is true)"),
        ("use_bias_in_mlp: 3", "neox.yml:1: --use-bias-in-mlp must be true or false, got '3'"),
        ("train_data_paths: [a, b]", "use --train-data-path, which takes pairs of a weight and a path"),
        ("moe_num_experts: 8", "--moe-num-experts 8 is not supported: use --num-experts"),
        ("zero_optimization: {stage: 9}", "zero_optimization.stage in the JSON"),
        ("fp16: {loss_scal: 1}", "neox.yml:1:1: unknown key loss_scal; did you mean loss_scale"),
    ],
)
def test_unsupported_entry_error_names_location(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_file(line + "\n", tmp_path)
    assert message in str(exc_info.value)


def test_deepspeed_keys_with_deepspeed_config_raise(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 1}')
    with pytest.raises(
        ConfigError, match="the file of --config has keys of DeepSpeed's JSON, got --deepspeed_config too"
    ):
        parse_file("gradient_clipping: 1\n", tmp_path, f"--deepspeed_config {tmp_path / 'ds.json'}")


def test_native_optimizer_section_is_parsed(tmp_path: Path) -> None:
    assert parse_file("optimizer:\n  lr: 0.5\n", tmp_path).optimizer.lr == 0.5


@pytest.mark.parametrize("has_bias", [True, False])
def test_bias_switches_set_biases(has_bias: bool, tmp_path: Path) -> None:
    switches = "".join(f"use_bias_in_{module}: {has_bias}\n" for module in ("norms", "attn_linear", "mlp"))
    model = parse_file(switches, tmp_path).model
    assert (model.norm_bias, model.hidden_bias) == (has_bias, has_bias)
    rms_config = parse_file(f"norm: rmsnorm\n{switches}", tmp_path)
    assert (
        rms_config.ignored["--use-bias-in-norms"] == "RMSNorm has no bias" and rms_config.model.hidden_bias == has_bias
    )


def test_command_line_overrides_bias_switches(tmp_path: Path) -> None:
    switches = "use_bias_in_norms: true\nuse_bias_in_attn_linear: true\nuse_bias_in_mlp: true\n"
    model = parse_file(switches, tmp_path, "--no-norm-bias --disable-bias-linear").model
    assert (model.norm_bias, model.hidden_bias) == (False, False)
    with pytest.raises(ConfigError, match="--use-bias-in-norms true must agree with .*norm_bias False"):
        parse_file(switches + "norm_bias: false\n", tmp_path)


def test_published_neox_names_are_accepted(tmp_path: Path) -> None:
    text = (
        "precision: bfloat16\nsliding_window_width: 8\n"
        "init_method: normal\noutput_layer_init_method: scaled_normal\nextra_save_iters: [1, 2]\n"
        "te_columnparallel: false\npipe_partition_method: type:transformer|mlp\ntrain_impl: normal\n"
    )
    config = parse_file(text, tmp_path)
    assert (config.precision.dtype, config.model.window_size) == ("bf16", 8)
    wandb_values = scan(["--wandb-team", "t", "--wandb-run-name", "r"]).values
    assert wandb_values == {"wandb_entity": "t", "wandb_exp_name": "r"}
    assert {"--extra-save-iters", "--pipe-partition-method", "--train-impl normal"} <= set(config.ignored)

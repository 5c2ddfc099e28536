"""Checkpoints of Megatron-LM, CPM-1 and DeepSpeed become ours, weight for weight; what they carry is not run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.legacy.convert import ImportOptions, import_checkpoint
from megatron.checkpoint.legacy.files import find_legacy_files
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.errors import CheckpointError, ConfigError
from tests.helpers.legacy_files import (
    NUM_HEADS,
    make_model,
    write_cpm1_checkpoint,
    write_layer_checkpoint,
    write_megatron_checkpoint,
)
from tools.import_checkpoint import main

Tensors = dict[str, torch.Tensor]


def named_weights(model: torch.nn.Module) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def import_weights(folder: Path, output: Path, **options: Any) -> tuple[Tensors, dict[str, Any]]:
    path, config, _ = import_checkpoint(folder, output, ImportOptions(**options))
    assert path.parent.parent == output
    return read_weights(open_folder(output)), config.identity()


def assert_same_tensors(actual: Tensors, expected: Tensors) -> None:
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    ("tensor", "pipe", "version"), [(1, 1, 3.0), (2, 1, 0), (2, 1, 1.0), (4, 1, 2.0), (2, 2, 3.0), (1, 4, 0)]
)
def test_megatron_gpt2_imports_from_any_layout_and_version(
    tmp_path: Path, tensor: int, pipe: int, version: float
) -> None:
    weights = named_weights(make_model())
    folder = write_megatron_checkpoint(tmp_path / "theirs", weights, tensor=tensor, pipe=pipe, version=version)
    loaded, identity = import_weights(folder, tmp_path / "run")
    assert_same_tensors(loaded, weights)
    assert identity["num_layers"] == 4 and identity["activation"] == "gelu-tanh" and identity["vocab_size"] == 40


def rename_norms(tree: Tensors | Any) -> Any:
    """Return ``tree`` with the names that Megatron-LM has for norms since 2023."""
    if not isinstance(tree, dict):
        return tree
    return {str(key).replace("layernorm", "norm"): rename_norms(value) for key, value in tree.items()}


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_renamed_norms_and_epsilon_are_recognized(tmp_path: Path, family: str) -> None:
    weights = named_weights(make_model(family))
    folder = write_megatron_checkpoint(tmp_path / "theirs", weights, tensor=2, norm_epsilon=1e-6)
    for path in folder.rglob("model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        torch.save(content | {"model": rename_norms(content["model"])}, path)
    _, config, _ = import_checkpoint(folder, tmp_path / "run", ImportOptions())
    assert_same_tensors(read_weights(open_folder(tmp_path / "run")), weights)
    assert config.model.layernorm_epsilon == 1e-6


def test_released_cpm1_files_are_imported(tmp_path: Path) -> None:
    weights = named_weights(make_model())
    folder = write_cpm1_checkpoint(tmp_path / "CPM-large", weights)
    with pytest.raises(CheckpointError, match="Set --num-attention-heads"):
        import_weights(folder, tmp_path / "run")
    loaded, identity = import_weights(folder, tmp_path / "run", num_heads=NUM_HEADS)
    assert_same_tensors(loaded, {name: tensor.half() for name, tensor in weights.items()})
    assert identity["activation"] == "gelu-tanh" and identity["hidden_bias"]


def test_deepspeed_pipeline_layers_merge_without_tied_copy(tmp_path: Path) -> None:
    weights = named_weights(make_model())
    loaded, identity = import_weights(write_layer_checkpoint(tmp_path / "theirs", weights), tmp_path / "run")
    assert_same_tensors(loaded, weights)
    assert not identity["untie_embeddings"]


@pytest.mark.parametrize("version", [0, 3.0])
def test_t5_with_learned_positions_is_imported(tmp_path: Path, version: float) -> None:
    weights = named_weights(make_model("t5"))
    folder = write_megatron_checkpoint(tmp_path / "theirs", weights, tensor=2, version=version)
    loaded, identity = import_weights(folder, tmp_path / "run")
    assert_same_tensors(loaded, weights)
    assert (identity["enc_layers"], identity["dec_layers"]) == (4, 4)
    assert identity["position_embedding_type"] == "learned_absolute"


def test_missing_version_requires_qkv_order(tmp_path: Path) -> None:
    weights = named_weights(make_model(untie_embeddings=True))
    folder = write_megatron_checkpoint(tmp_path / "theirs", weights, version=None)
    with pytest.raises(CheckpointError, match="Set --qkv-order: heads-3-d for CPM-Pretrain"):
        import_weights(folder, tmp_path / "run")
    loaded, identity = import_weights(folder, tmp_path / "run", qkv_order="heads-3-d")
    assert_same_tensors(loaded, weights)
    assert identity["untie_embeddings"]


def test_activation_and_padding_follow_file_and_vocab_size(tmp_path: Path) -> None:
    weights = named_weights(make_model())
    folder = write_megatron_checkpoint(tmp_path / "theirs", weights, bias_gelu_fusion=False, openai_gelu=False)
    loaded, identity = import_weights(folder, tmp_path / "run", vocab_size=37)
    assert identity["activation"] == "gelu" and identity["vocab_size"] == 37
    assert torch.equal(loaded["embedding.word.weight"], weights["embedding.word.weight"][:37])
    with pytest.raises(CheckpointError, match="--vocab-size must be at most the 40 rows"):
        import_weights(folder, tmp_path / "other", vocab_size=41)
    with pytest.raises(ConfigError):
        import_weights(folder, tmp_path / "run")
    assert not (tmp_path / "other").exists()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_pickled_code_is_not_executed(tmp_path: Path) -> None:
    folder = write_megatron_checkpoint(tmp_path / "theirs", named_weights(make_model()))
    path = folder / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "bomb": Bomb(tmp_path / "exploded")}, path)
    with pytest.raises(CheckpointError, match="none of them was created"):
        import_weights(folder, tmp_path / "run")
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "run").exists()


def truncate_file(folder: Path) -> None:
    path = folder / "iter_0000100" / "mp_rank_01" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-100])


def delete_file(folder: Path) -> None:
    (folder / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt").unlink()


def point_to_missing_iteration(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text("200")


def delete_positions(folder: Path) -> None:
    for path in folder.rglob("model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        del content["model"]["language_model"]["embedding"]["position_embeddings"]
        torch.save(content, path)


def delete_rank(folder: Path) -> None:
    (folder / "iter_0000100" / "mp_rank_00").rename(folder / "gone")


def add_tensor(folder: Path) -> None:
    for rank in range(2):
        path = folder / "iter_0000100" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        content["model"]["language_model"]["transformer"]["layers.1.router.weight"] = torch.zeros(2)
        torch.save(content, path)


def write_distributed_files(
    folder: Path, names: tuple[str, ...] = (".metadata", "__0_0.distcp", "common.pt", "metadata.json")
) -> None:
    """Leave what Megatron-Core leaves, and nothing of the old files."""
    step_dir = folder / "iter_0000100"
    shutil.rmtree(step_dir)
    step_dir.mkdir()
    for name in names:
        (step_dir / name).write_bytes(b"")


def write_zarr_files(folder: Path) -> None:
    write_distributed_files(folder, ("common.pt", "metadata.json"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            write_distributed_files,
            r"distributed checkpoint of Megatron-Core \(__0_0.distcp\), which needs no import: train with --load",
        ),
        (
            write_zarr_files,
            r"distributed checkpoint of Megatron-Core \(common.pt, metadata.json\).* --ckpt-convert-format torch ",
        ),
        (truncate_file, "cannot be read by torch.load"),
        (delete_file, "must contain model_optim_rng.pt or model_rng.pt"),
        (point_to_missing_iteration, "must contain iter_0000200 or 200 or global_step200"),
        (delete_rank, "lacks files of stage or layer / tensor rank 0/0"),
        (delete_positions, r"lacks learned positions .* settings name no other type"),
        (add_tensor, "do not belong to a supported decoder or T5: language_model.transformer.layers.1.router.weight"),
    ],
)
def test_damaged_folder_error_names_problem(tmp_path: Path, damage: Any, message: str) -> None:
    folder = write_megatron_checkpoint(tmp_path / "theirs", named_weights(make_model()), tensor=2)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        import_weights(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"swiglu": True, "use_rotary_position_embeddings": True}, ": a gated activation, positions of type rope$"),
        ({"squared_relu": True}, "a squared ReLU"),
        ({"apply_layernorm_1p": True}, r"norms whose weights are stored minus 1 \(--apply-layernorm-1p\)"),
        pytest.param({"normalization": "RMSNorm"}, "RMSNorm instead of LayerNorm", marks=pytest.mark.slow),
        pytest.param({"position_embedding_type": "rope"}, ": positions of type rope$", marks=pytest.mark.slow),
        pytest.param({"position_embedding_type": "relative"}, ": positions of type relative$", marks=pytest.mark.slow),
    ],
    ids=["gated", "squared", "less 1", "other norms", "rope", "relative"],
)
def test_t5_rejects_unsupported_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = write_megatron_checkpoint(tmp_path / "theirs", named_weights(make_model("t5")), **settings)
    with pytest.raises(CheckpointError, match=message):
        import_weights(folder, tmp_path / "run")
    supported = {"normalization": "LayerNorm", "squared_relu": False, "position_embedding_type": "learned_absolute"}
    supported_folder = write_megatron_checkpoint(tmp_path / "plain", named_weights(make_model("t5")), **supported)
    import_weights(supported_folder, tmp_path / "run")


def test_native_checkpoint_is_not_detected_as_megatron_core(tmp_path: Path) -> None:
    """Both are written through torch.distributed.checkpoint."""
    import_weights(write_megatron_checkpoint(tmp_path / "theirs", named_weights(make_model())), tmp_path / "run")
    (checkpoint_dir,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    with pytest.raises(CheckpointError, match="contains no checkpoint of Megatron-LM, CPM or DeepSpeed"):
        find_legacy_files(checkpoint_dir)


def test_import_tool_prints_model_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    folder = write_cpm1_checkpoint(tmp_path / "CPM-large", named_weights(make_model()))
    argv = ["--input", str(folder), "--output", str(tmp_path / "run"), "--num-attention-heads", "4"]
    monkeypatch.setattr("sys.argv", ["import_checkpoint.py", *argv])
    assert main() == 0
    output = capsys.readouterr().err + caplog.text
    assert "3-heads-d" in output and "pretrain_gpt2.py --load" in output and "--activation gelu-tanh" in output
    assert main() == 2  # the folder holds something now

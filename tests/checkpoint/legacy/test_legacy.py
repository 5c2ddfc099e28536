"""Checkpoints of Megatron-LM, CPM-1 and DeepSpeed become ours, weight for weight; what they carry is not run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.legacy.convert import Wishes, import_checkpoint
from megatron.checkpoint.legacy.files import find_legacy_files
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.errors import CheckpointError, ConfigError
from tests.helpers.legacy_files import HEADS, model_of, write_cpm1, write_layers, write_megatron
from tools.import_checkpoint import main

Tensors = dict[str, torch.Tensor]


def weights_of(model: torch.nn.Module) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def imported(folder: Path, output: Path, **wishes: Any) -> tuple[Tensors, dict[str, Any]]:
    path, config, _ = import_checkpoint(folder, output, Wishes(**wishes))
    assert path.parent.parent == output
    return read_weights(open_folder(output)), config.identity()


def require_same(found: Tensors, expected: Tensors) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("tensor", "pipe", "version"), [(1, 1, 3.0), (2, 1, 0), (2, 1, 1.0), (4, 1, 2.0), (2, 2, 3.0), (1, 4, 0)]
)
def test_a_gpt2_of_megatron_in_any_layout_and_version_is_the_same_model(
    tmp_path: Path, tensor: int, pipe: int, version: float
) -> None:
    ours = weights_of(model_of())
    folder = write_megatron(tmp_path / "theirs", ours, tensor=tensor, pipe=pipe, version=version)
    found, identity = imported(folder, tmp_path / "run")
    require_same(found, ours)
    assert identity["num_layers"] == 4 and identity["activation"] == "gelu-tanh" and identity["vocab_size"] == 40


def rename_norms(tree: Tensors | Any) -> Any:
    """Return ``tree`` with the names that Megatron-LM has for norms since 2023."""
    if not isinstance(tree, dict):
        return tree
    return {str(key).replace("layernorm", "norm"): rename_norms(value) for key, value in tree.items()}


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_norms_and_their_epsilon_are_known_by_their_later_names(tmp_path: Path, family: str) -> None:
    ours = weights_of(model_of(family))
    folder = write_megatron(tmp_path / "theirs", ours, tensor=2, norm_epsilon=1e-6)
    for path in folder.rglob("model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        torch.save(content | {"model": rename_norms(content["model"])}, path)
    _, config, _ = import_checkpoint(folder, tmp_path / "run", Wishes())
    require_same(read_weights(open_folder(tmp_path / "run")), ours)
    assert config.model.layernorm_epsilon == 1e-6


def test_the_released_files_of_cpm1_are_read(tmp_path: Path) -> None:
    ours = weights_of(model_of())
    folder = write_cpm1(tmp_path / "CPM-large", ours)
    with pytest.raises(CheckpointError, match="Set --num-attention-heads"):
        imported(folder, tmp_path / "run")
    found, identity = imported(folder, tmp_path / "run", num_heads=HEADS)
    require_same(found, {name: tensor.half() for name, tensor in ours.items()})
    assert identity["activation"] == "gelu-tanh" and identity["hidden_bias"]


def test_layers_of_a_deepspeed_pipeline_are_joined_and_the_tied_copy_left_out(tmp_path: Path) -> None:
    ours = weights_of(model_of())
    found, identity = imported(write_layers(tmp_path / "theirs", ours), tmp_path / "run")
    require_same(found, ours)
    assert not identity["untie_embeddings"]


@pytest.mark.parametrize("version", [0, 3.0])
def test_a_t5_with_learned_positions_is_read(tmp_path: Path, version: float) -> None:
    ours = weights_of(model_of("t5"))
    folder = write_megatron(tmp_path / "theirs", ours, tensor=2, version=version)
    found, identity = imported(folder, tmp_path / "run")
    require_same(found, ours)
    assert (identity["enc_layers"], identity["dec_layers"]) == (4, 4)
    assert identity["position_embedding_type"] == "learned_absolute"


def test_without_a_version_the_order_must_be_given(tmp_path: Path) -> None:
    ours = weights_of(model_of(untie_embeddings=True))
    folder = write_megatron(tmp_path / "theirs", ours, version=None)
    with pytest.raises(CheckpointError, match="Set --qkv-order: heads-3-d for CPM-Pretrain"):
        imported(folder, tmp_path / "run")
    found, identity = imported(folder, tmp_path / "run", qkv_order="heads-3-d")
    require_same(found, ours)
    assert identity["untie_embeddings"]


def test_the_exact_gelu_and_rows_of_padding_are_told_by_file_and_flag(tmp_path: Path) -> None:
    ours = weights_of(model_of())
    folder = write_megatron(tmp_path / "theirs", ours, bias_gelu_fusion=False, openai_gelu=False)
    found, identity = imported(folder, tmp_path / "run", vocab_size=37)
    assert identity["activation"] == "gelu" and identity["vocab_size"] == 37
    assert torch.equal(found["embedding.word.weight"], ours["embedding.word.weight"][:37])
    with pytest.raises(CheckpointError, match="--vocab-size must be at most the 40 rows"):
        imported(folder, tmp_path / "other", vocab_size=41)
    with pytest.raises(ConfigError):
        imported(folder, tmp_path / "run")
    assert not (tmp_path / "other").exists()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_nothing_that_a_file_carries_is_run(tmp_path: Path) -> None:
    folder = write_megatron(tmp_path / "theirs", weights_of(model_of()))
    path = folder / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "bomb": Bomb(tmp_path / "exploded")}, path)
    with pytest.raises(CheckpointError, match="none of them was created"):
        imported(folder, tmp_path / "run")
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "run").exists()


def cut_short(folder: Path) -> None:
    path = folder / "iter_0000100" / "mp_rank_01" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-100])


def take_away(folder: Path) -> None:
    (folder / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt").unlink()


def point_elsewhere(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text("200")


def take_positions(folder: Path) -> None:
    for path in folder.rglob("model_optim_rng.pt"):
        content = torch.load(path, weights_only=False)
        del content["model"]["language_model"]["embedding"]["position_embeddings"]
        torch.save(content, path)


def take_rank(folder: Path) -> None:
    (folder / "iter_0000100" / "mp_rank_00").rename(folder / "gone")


def add_tensor(folder: Path) -> None:
    for rank in range(2):
        path = folder / "iter_0000100" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        content["model"]["language_model"]["transformer"]["layers.1.router.weight"] = torch.zeros(2)
        torch.save(content, path)


def distribute(
    folder: Path, names: tuple[str, ...] = (".metadata", "__0_0.distcp", "common.pt", "metadata.json")
) -> None:
    """Leave what Megatron-Core leaves, and nothing of the old files."""
    inner = folder / "iter_0000100"
    shutil.rmtree(inner)
    inner.mkdir()
    for name in names:
        (inner / name).write_bytes(b"")


def distribute_by_zarr(folder: Path) -> None:
    distribute(folder, ("common.pt", "metadata.json"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            distribute,
            r"distributed checkpoint of Megatron-Core \(__0_0.distcp\).* --ckpt-convert-format torch .*convert.py",
        ),
        (distribute_by_zarr, r"distributed checkpoint of Megatron-Core \(common.pt, metadata.json\)"),
        (cut_short, "cannot be read by torch.load"),
        (take_away, "must contain model_optim_rng.pt or model_rng.pt"),
        (point_elsewhere, "must contain iter_0000200 or 200 or global_step200"),
        (take_rank, "lacks files of stage or layer / tensor rank 0/0"),
        (take_positions, r"lacks learned positions .* settings name no other type"),
        (add_tensor, "do not belong to a supported decoder or T5: language_model.transformer.layers.1.router.weight"),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    folder = write_megatron(tmp_path / "theirs", weights_of(model_of()), tensor=2)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        imported(folder, tmp_path / "run")
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
def test_settings_that_a_t5_does_not_have_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = write_megatron(tmp_path / "theirs", weights_of(model_of("t5")), **settings)
    with pytest.raises(CheckpointError, match=message):
        imported(folder, tmp_path / "run")
    usual = {"normalization": "LayerNorm", "squared_relu": False, "position_embedding_type": "learned_absolute"}
    plain = write_megatron(tmp_path / "plain", weights_of(model_of("t5")), **usual)
    imported(plain, tmp_path / "run")


def test_a_checkpoint_of_ours_is_not_taken_for_one_of_megatron_core(tmp_path: Path) -> None:
    """Both are written through torch.distributed.checkpoint."""
    imported(write_megatron(tmp_path / "theirs", weights_of(model_of())), tmp_path / "run")
    (ours,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    with pytest.raises(CheckpointError, match="contains no checkpoint of Megatron-LM, CPM or DeepSpeed"):
        find_legacy_files(ours)


def test_the_tool_prints_the_flags_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    folder = write_cpm1(tmp_path / "CPM-large", weights_of(model_of()))
    words = ["--input", str(folder), "--output", str(tmp_path / "run"), "--num-attention-heads", "4"]
    monkeypatch.setattr("sys.argv", ["import_checkpoint.py", *words])
    assert main() == 0
    output = capsys.readouterr().err + caplog.text
    assert "3-heads-d" in output and "pretrain_gpt2.py --load" in output and "--activation gelu-tanh" in output
    assert main() == 2  # the folder holds something now

"""A checkpoint that megatron-core has written is read here, and written again with the same tensors.

``tests/megatron_core/make_checkpoint.py`` made the checkpoint: step 2 of a Mixtral with expert parallelism, and the
losses that megatron-core computed in the next steps.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt2
from megatron.arguments.scan import Scan
from megatron.checkpoint.checkpoint_args import load_checkpoint_args, read_source
from megatron.checkpoint.metadata import MANIFEST_NAME
from megatron.checkpoint.one_process import open_folder, read_full
from megatron.checkpoint.torch_dist import settings
from megatron.checkpoint.torch_dist.checkpoint import TorchDistCheckpoint, open_torch_dist
from megatron.checkpoint.torch_dist.export import ExportOptions, export_torch_dist
from megatron.checkpoint.torch_dist.folder import TorchDistFolder, _adam_steps, find_iteration, read_folder
from megatron.checkpoint.torch_dist.index import TorchDistIndex, read_index
from megatron.checkpoint.torch_dist.inert_pickle import InertObject, read_inertly
from megatron.checkpoint.torch_dist.reader import TorchDistReader
from megatron.checkpoint.torch_dist.settings import build_config, missing_features, setting_values
from megatron.checkpoint.torch_dist.torch_zip import read_archive
from megatron.checkpoint.torch_dist.writer import TensorEntry, write_entries
from megatron.config import parse
from megatron.data.mock_dataset import MockTokens
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.groups import SINGLE
from megatron.training import global_vars, initialize
from megatron.training.checkpoint_checks import check_fits
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer
from megatron.training.restore_options import EVERYTHING
from megatron.training.resume import open_source, restore_trainer
from megatron.training.setup import build_engine, make_streams
from megatron.training.trainer import Trainer
from tests.helpers.harness import run_ranks
from tests.megatron_core.make_checkpoint import BATCH, CHECKPOINT, LAST, SAVED, SEED, SEQ_LENGTH, VOCAB_SIZE

ITERATION = f"iter_{SAVED:07d}"
LAYOUT_ARGS = ("expert_model_parallel_size", "data_parallel_size", "world_size")
FLAGS = (
    f"--seq-length {SEQ_LENGTH} --hidden-dropout 0 --attention-dropout 0 --data-path none --device cpu --fp32 "
    "--train-iters 8 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 4 --weight-decay 0.1 "
    "--adam-beta2 0.95"
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that megatron-core has written, with losses.json next to it; not to be changed."""
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(CHECKPOINT) as archive:
        archive.extractall(folder, filter="data")
    return folder / "megatron"


@pytest.fixture
def damaged(written: Path, tmp_path: Path) -> Path:
    """A copy of the folder."""
    return shutil.copytree(written, tmp_path / "megatron")


def continue_run(rank: int, argv: list[str], num_ranks: int, source: Path) -> list[tuple[float, float]]:
    """Return loss and learning rate of each step after the checkpoint in ``source``."""
    argv = [*argv, "--load", str(source)]
    config = parse(argv, world_size=num_ranks, env={}, checkpoint_args=partial(load_checkpoint_args, name="x"))
    config = config.with_vocab(VOCAB_SIZE)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    data = RunData({"train": MockTokens(VOCAB_SIZE, SEQ_LENGTH, SEED)} if world.reads_data else {}, None)
    trainer = Trainer(config, world, engine, data, Path())
    checkpoint = open_source(source, world)
    check_fits(checkpoint, config, None, EVERYTHING)
    trainer.progress = restore_trainer(trainer, checkpoint, EVERYTHING)
    with trainer.open_batches():
        steps = [trainer.train_step().loss for _ in range(SAVED, LAST)]
    return [(loss, trainer.learning_rate or 0.0) for loss in steps]


@pytest.mark.parametrize(
    "layout",
    [
        f"--batch-size {BATCH}",
        pytest.param(f"--batch-size 1 --gas {BATCH} --pipe-parallel-size 2", marks=pytest.mark.slow),
        pytest.param("--batch-size 1 --expert-model-parallel-size 2 --zero-stage 1", marks=pytest.mark.slow),
        pytest.param(f"--batch-size {BATCH} --model-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_losses_after_load_are_those_of_megatron_core(written: Path, layout: str) -> None:
    num_ranks = 1 if layout == f"--batch-size {BATCH}" else 2
    expected = json.loads((written.parent / "losses.json").read_text())
    for steps in run_ranks(num_ranks, continue_run, f"{FLAGS} {layout}".split(), num_ranks, written):
        losses = [expected[str(step)][0] for step in range(SAVED + 1, LAST + 1)]
        assert [loss for loss, _ in steps] == pytest.approx(losses, abs=1e-6)
        assert steps[-1][1] == pytest.approx(expected[str(LAST)][1], rel=1e-12), "--lr-step-offset -1"


def test_settings_and_counters_are_those_of_megatron_core(written: Path) -> None:
    checkpoint = open_folder(written)
    assert checkpoint.path.name == ITERATION and checkpoint.step == SAVED
    progress = checkpoint.metadata["progress"]
    assert progress == {
        "step": SAVED, "updates": SAVED, "samples_consumed": SAVED * BATCH, "samples_skipped": 0,
        "tokens_consumed": SAVED * BATCH * SEQ_LENGTH,
    }  # fmt: skip
    assert checkpoint.metadata["optimizer_steps"] == SAVED
    source = read_source(written, "gpt2")
    assert source is not None
    model = source.model_settings()
    assert (model["num_experts"], model["num_query_groups"], model["activation"]) == (4, 2, "gated-silu")
    assert source.retained["lr_step_offset"] == -1 and source.retained["loss_average"] == "micro-batch"
    assert source.optimizer["lr"] == 1e-2 and source.optimizer["lr_decay_style"] == "cosine"


def test_offset_of_megatron_is_kept_unless_flag_is_set(written: Path) -> None:
    def offset(*flags: str) -> int:
        argv = ["--load", str(written), *FLAGS.split(), *flags]
        checkpoint_args = partial(load_checkpoint_args, name="x")
        return parse(argv, world_size=1, env={}, checkpoint_args=checkpoint_args).optimizer.lr_step_offset

    assert [offset(), offset("--lr-step-offset", "0"), offset("--finetune")] == [-1, 0, 0]


# Export.


def read_raw(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the checkpoint ``path`` with the names and rows of Megatron-Core."""
    folder = read_folder(path)
    reader = TorchDistReader(path, folder.index)
    return {
        name: reader.read(name, [(0, size) for size in tensor.shape]) for name, tensor in folder.index.tensors.items()
    }


def has_group_steps(path: Path) -> bool:
    """Return True if a parameter group in ``common.pt`` has a number of updates."""
    with zipfile.ZipFile(path / "common.pt") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return b"X\x04\x00\x00\x00step" in archive.read(name)  # a text of four bytes, as pickle encodes it


def test_export_of_checkpoint_has_same_tensors_and_objects(written: Path, tmp_path: Path) -> None:
    checkpoint = open_folder(written)
    path, notes = export_torch_dist(
        checkpoint, tmp_path / "exported", ExportOptions(has_torch_adam=True, has_expert_parallelism=True)
    )
    assert notes == [] and find_iteration(tmp_path / "exported") == path
    expected, actual = read_raw(written / ITERATION), read_raw(path)
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    original, exported = read_folder(written / ITERATION), read_folder(path)
    assert set(original.index.objects) - set(exported.index.objects) == set()
    assert exported.scheduler == original.scheduler and exported.adam_steps == original.adam_steps
    assert not has_group_steps(written / ITERATION) and not has_group_steps(path)
    names = original.args.keys() & exported.args.keys() - {"params_dtype", *LAYOUT_ARGS}
    differing = {name: (original.args[name], exported.args[name]) for name in names}
    changed = {name: values for name, values in differing.items() if values[0] != values[1]}
    assert changed.keys() <= {"seed", "moe_shared_expert_intermediate_size"}, changed
    again = open_folder(tmp_path / "exported")
    assert [
        name for name in checkpoint.names() if not torch.equal(read_full(checkpoint, name), read_full(again, name))
    ] == []
    assert again.metadata["progress"] == checkpoint.metadata["progress"]
    assert again.metadata["model"] == checkpoint.metadata["model"]


@pytest.mark.parametrize("is_distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_export_in_16_bits_keeps_main_params(written: Path, tmp_path: Path, is_distributed: bool) -> None:
    checkpoint = open_folder(written)
    options = ExportOptions(uses_distributed_optimizer=is_distributed, dtype="bf16", has_expert_parallelism=True)
    path, _ = export_torch_dist(checkpoint, tmp_path, options)
    folder, again = read_folder(path), open_folder(tmp_path)
    assert has_group_steps(path)
    assert folder.index.tensors["output_layer.weight"].dtype == "BF16"
    main_param = "param" if is_distributed else "fp32_param"
    assert folder.index.tensors[f"optimizer.state.{main_param}.output_layer.weight"].dtype == "F32"
    assert folder.sharding == ("fully_reshardable" if is_distributed else "")
    for name in checkpoint.names():
        assert torch.equal(read_full(checkpoint, name), read_full(again, name)), name


def test_number_of_updates_is_that_of_the_parameters() -> None:
    """Torch's AdamW leaves the number in a loaded group unchanged."""
    state = {"state": {"common_step": 16}, "param_groups": [{"step": 13}, {"step": 13}]}
    assert _adam_steps({0: state, 1: state}, memoryview(b"")) == 16
    with pytest.raises(ValueError, match=r"different numbers of updates: \[15, 16\]"):
        _adam_steps({0: state, 1: {"state": {"common_step": 15}}}, memoryview(b""))


def test_export_rejects_existing_iteration_and_unknown_settings(written: Path, tmp_path: Path) -> None:
    checkpoint = open_folder(written)
    export_torch_dist(checkpoint, tmp_path, ExportOptions())
    with pytest.raises(ConfigError, match=f"--output must not contain {ITERATION}"):
        export_torch_dist(checkpoint, tmp_path, ExportOptions())
    model = {**checkpoint.metadata["config"]["model"], "attn_logit_softcapping": 30.0, "moe_use_residual": True}
    checkpoint.metadata["config"] = {**checkpoint.metadata["config"], "model": model}
    with pytest.raises(
        CheckpointError,
        match=r"settings that Megatron-LM's GPT does not have: moe_use_residual True, attn_logit_softcapping 30",
    ):
        export_torch_dist(checkpoint, tmp_path / "other", ExportOptions())
    assert not (tmp_path / "other").exists()


# Damage: one error that names the file, before anything is loaded.


def flip_byte(folder: Path) -> None:
    path = max((folder / ITERATION).glob("*.distcp"))
    index = read_folder(folder / ITERATION).index
    span = next(c.span for t in index.tensors.values() for c in t.chunks if c.span.file == path.name)
    content = bytearray(path.read_bytes())
    archived = read_archive(memoryview(bytes(content))[span.start : span.start + span.num_bytes])
    content[span.start + archived.start] ^= 1
    path.write_bytes(content)


def truncate_tensors(folder: Path) -> None:
    path = max((folder / ITERATION).glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-100])


def truncate(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / ITERATION / name
        path.write_bytes(path.read_bytes()[:-100])

    return damage


def delete(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for path in (folder / ITERATION).glob(name):
            path.unlink()

    return damage


def point_elsewhere(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def name_zarr(folder: Path) -> None:
    path = folder / ITERATION / "metadata.json"
    path.write_text(path.read_text().replace("torch_dist", "zarr"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_byte, r"\.distcp: .* is damaged: its checksum does not match"),
        (truncate_tensors, r"not a complete checkpoint: __\d_\d\.distcp has \d+ bytes instead of \d+"),
        (delete("__0_0.distcp"), r"not a complete checkpoint: __0_0\.distcp is missing"),
        (truncate(".metadata"), r"\.metadata is damaged"),
        (delete(".metadata"), r"\.metadata cannot be read: No such file"),
        (truncate("common.pt"), r"common\.pt is damaged"),
        (delete("common.pt"), r"common\.pt is missing"),
        (delete("metadata.json"), r"metadata\.json: No such file or directory\. The save was interrupted"),
        (name_zarr, r"must have the format torch_dist, got zarr"),
        (point_elsewhere, rf"names '7', but .*iter_0000007 does not exist\. .*--load: {ITERATION}"),
    ],
)
def test_damage_is_one_error(damaged: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(damaged)
    with pytest.raises(CheckpointError, match=message):
        checkpoint = open_folder(damaged)
        for name in checkpoint.names():
            read_full(checkpoint, name)


class Malicious:
    """A value whose pickle calls a function."""

    def __reduce__(self) -> Any:
        return Path.mkdir, (Path("created-by-a-pickle"),)


def test_pickles_call_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value = read_inertly(pickle.dumps({"a": [1, (2.5, "b")], "c": Malicious()}))
    assert value["a"] == [1, (2.5, "b")] and isinstance(value["c"], InertObject)
    assert not any(tmp_path.iterdir())


# Forms that differ from the fixture.


@pytest.fixture(scope="module")
def folder(written: Path) -> TorchDistFolder:
    return read_folder(written / ITERATION)


def open_changed(folder: TorchDistFolder, **changes: Any) -> TorchDistCheckpoint:
    """Open the checkpoint with other fields."""
    changed = replace(folder, **changes)
    values = setting_values(changed)
    return TorchDistCheckpoint(changed, build_config(values), set(values), SINGLE)


def test_state_by_buffers_is_reported_and_weights_load(folder: TorchDistFolder, written: Path) -> None:
    tensors = {name: t for name, t in folder.index.tensors.items() if not name.startswith("optimizer.")}
    buffer = folder.index.tensors["decoder.final_layernorm.weight"]
    tensors["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_f.bucket_idx_0.exp_avg"] = buffer
    index = TorchDistIndex(tensors, folder.index.objects)
    checkpoint = open_changed(folder, index=index, sharding="dp_reshardable", adam_steps=None)
    assert all(name.startswith(("weights/", "routers/")) for name in checkpoint.names())
    whole = open_folder(written)
    assert torch.equal(read_full(checkpoint, "weights/head.weight"), read_full(whole, "weights/head.weight"))
    config = parse([*FLAGS.split(), "--load", str(written)], world_size=1, env={}, checkpoint_args=load_checkpoint_args)
    with pytest.raises(
        CheckpointError, match=r"dp_reshardable.*--dist-ckpt-optim-fully-reshardable\)\. Add --no-load-optim"
    ):
        check_fits(checkpoint, config, None, EVERYTHING)


def test_skipped_steps_and_loss_scale_of_fp16_run(folder: TorchDistFolder) -> None:
    checkpoint = open_changed(
        folder,
        args={**folder.args, "fp16": True, "hysteresis": 2, "consumed_train_samples": 10},
        scheduler={**folder.scheduler, "num_steps": 6},
        scaler={"scale": 1024.0, "growth_tracker": 7, "hysteresis_tracker": 0},
        iteration=5,
        adam_steps=3,
    )
    progress = checkpoint.metadata["progress"]
    assert (progress["step"], progress["updates"], progress["samples_skipped"]) == (5, 3, 4)
    scaler = {"scale": 1024.0, "good_steps": 7, "overflows_left": 1, "is_dynamic": True, "hysteresis": 2}
    assert checkpoint.metadata["scaler"] == scaler


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"lr_warmup_fraction": 0.1}, {"warmup": 0.1}),
        ({"train_samples": 1000, "lr_warmup_samples": 90, "lr_decay_samples": 800, "train_iters": None},
         {"lr_warmup_samples": 90, "lr_decay_samples": 800}),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3, "lr_wsd_decay_style": "linear"},
         {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 3, "lr_wsd_decay_style": "linear"}),
        ({"calculate_per_token_loss": True}, {"loss_average": "token"}),
        ({"moe_layer_freq": [1, 1]}, {"moe_layer_freq": "[1,1]"}),
        ({"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.02]},
         {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.02}),
        ({"num_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
          "moe_aux_loss_coeff": [0.02, 0.001]},
         {"moe_router_load_balancing_type": "aux_loss seq_aux_loss", "moe_aux_loss_coeff": "0.02 0.001"}),
        ({"rotary_interleaved": True, "rotary_base": 500000}, {"rotary_interleaved": True, "rotary_base": 500000.0}),
        ({"bf16": True}, {"dtype": "bf16"}),
        ({"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
         {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}),
        ({"qk_l2_norm": True}, {"qk_norm": "l2"}),
        ({"qk_clip": True, "qk_clip_threshold": 50, "qk_clip_alpha": 0.3},
         {"qk_clip": True, "qk_clip_threshold": 50.0, "qk_clip_alpha": 0.3}),
        ({"qk_clip": True, "qk_layernorm": True}, {"qk_clip": None}),
    ],
)  # fmt: skip
def test_argument_sets_our_setting(folder: TorchDistFolder, args: dict[str, Any], expected: dict[str, Any]) -> None:
    values = setting_values(replace(folder, args={**folder.args, **args}))
    assert {name: values.get(name) for name in expected} == expected
    build_config(values)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"mtp_num_layers": 1}, "unsupported features: layers for multi-token prediction"),
        ({"multi_latent_attention": True}, "unsupported features: latent attention"),
        ({"num_layers": 3}, r"layers\.2\.input_norm\.weight: missing"),
        ({"num_layers": 1}, r"layer_norm_weight: 2 layers and experts are stacked, more than the model has"),
        ({"num_attention_heads": 2}, r"query_key_value\.weight: .* has the shape"),
        ({"num_layers": None}, "has an invalid value"),
        ({"use_mup": True}, r"unsupported features: muP \(--use-mup\)"),
        ({"moe_apply_probs_on_input": True}, "probabilities that multiply the inputs of experts"),
        ({"moe_mlp_glu_interleave_size": 32}, "blocks of gates and values"),
        ({"moe_router_score_function": "sqrtsoftplus"}, "--moe-router-score-function must be one of .*sqrtsoftplus"),
    ],
)
def test_unsupported_model_is_one_error(folder: TorchDistFolder, args: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_changed(folder, args={**folder.args, **args})


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, []),
        ({"weight_decay_incr_style": "constant", "moe_aux_loss_coeff": 0.01}, []),
        ({"weight_decay_incr_style": "cosine", "start_weight_decay": 0.0, "end_weight_decay": 0.1}, []),
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01}, []),
        ({"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]}, []),
        ({"moe_router_load_balancing_type": ["aux_loss", "other_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
         ["the load-balancing losses other_loss 0.2"]),
        ({"lr_warmup_init": 1e-5}, []),
        ({"qk_clip": True}, []),
        ({"qk_clip": True, "qk_layernorm": True},
         ["clipping of query and key weights, which has no effect on the logits with QK norms (qk_clip)"]),
    ],
)  # fmt: skip
def test_features_that_a_continued_run_does_not_have_are_named(
    folder: TorchDistFolder, args: dict[str, Any], expected: list[str]
) -> None:
    assert list(missing_features({**folder.args, **args})) == expected


def test_start_lists_missing_features(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "missing_features", lambda args: ["a warm-up", "noise"])
    scanned = Scan("gpt2")
    scanned.values["load"] = str(written)
    load_checkpoint_args(scanned, {})
    assert any("this run continues without a warm-up; noise" in note for note in scanned.notes)
    scanned = Scan("gpt2")
    scanned.values |= {"load": str(written), "finetune": True}
    load_checkpoint_args(scanned, {})
    assert not any("continues without" in note for note in scanned.notes)


@pytest.mark.parametrize(
    ("pointer", "name", "message"),
    [
        ("10", "iter_0000010/mp_rank_00/model_optim_rng.pt", r"import_checkpoint\.py --input .*iter_0000010"),
        ("", "mp_rank_00/model_optim_rng.pt", r"has a file for each rank"),
        ("80000", "80000/mp_rank_00_model_states.pt", r"import_checkpoint\.py --input .*80000"),
        ("10", "iter_0000010/metadata.json", r"must have the format torch_dist, got zarr"),
    ],
)
def test_other_formats_of_megatron_are_named(tmp_path: Path, pointer: str, name: str, message: str) -> None:
    """pretrain_gpt.py starts from scratch if --load finds no checkpoint, but not if it cannot read the checkpoint."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text('{"sharded_backend": "zarr"}')
    if path.name == "metadata.json":
        (path.parent / "common.pt").touch()
    if pointer:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(pointer)
    with pytest.raises(CheckpointError, match=message):
        read_source(tmp_path, "gpt2")


def test_missing_argument_is_named(folder: TorchDistFolder) -> None:
    args = {name: value for name, value in folder.args.items() if name != "num_layers"}
    with pytest.raises(CheckpointError, match="the arguments in the checkpoint lack 'num_layers'"):
        setting_values(replace(folder, args=args))


def test_own_checkpoints_in_folder_take_precedence(damaged: Path) -> None:
    assert find_iteration(damaged) == find_iteration(damaged / ITERATION) == damaged / ITERATION
    (damaged / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert find_iteration(damaged) is None and find_iteration(damaged / ITERATION) is not None
    (damaged / ITERATION / MANIFEST_NAME).touch()
    assert find_iteration(damaged / ITERATION) is None


def test_open_checkpoint_of_one_iteration(written: Path) -> None:
    assert open_torch_dist(written / ITERATION, SINGLE).names() == open_folder(written).names()


def test_part_of_tensor_is_assembled_from_chunks_of_several_ranks(tmp_path: Path) -> None:
    """Layers stacked in the first dimension, of which two tensor ranks wrote halves of the rows."""
    full = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(1))

    def chunk(layer: int, row: int) -> TensorEntry:
        values = full[layer : layer + 1, row : row + 3]
        return TensorEntry("w", (2, 6, 5), (layer, row, 0), (1, 3, 5), full.dtype, values.clone)

    entries = [chunk(layer, row) for layer in (0, 1) for row in (0, 3)]
    entries.append(TensorEntry("t", (5, 6), (0, 0), (5, 6), full.dtype, full[0].t))
    write_entries(tmp_path, entries, {"object": [None]})
    index = read_index(tmp_path)
    reader = TorchDistReader(tmp_path, index)
    assert torch.equal(reader.read("w", [(0, 2), (0, 6), (0, 5)]), full)
    assert torch.equal(reader.read("w", [(1, 2), (2, 5), (1, 4)]), full[1:2, 2:5, 1:4])
    assert torch.equal(reader.read("t", [(1, 4), (2, 3)]), full[0].t()[1:4, 2:3])
    assert set(index.objects) == {"object"}

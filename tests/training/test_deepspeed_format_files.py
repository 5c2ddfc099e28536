"""Files in DeepSpeed's layout: crash points, full disks, damage, other layouts, stock DeepSpeed, and hostile ones."""

from __future__ import annotations

import errno
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from megatron import files
from megatron.checkpoint import metadata
from megatron.checkpoint.retention import KEEP_ALL, RetentionPolicy
from megatron.config import Config, parse
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.groups import SINGLE, Group, single_grid
from megatron.mpu.topology import Topology
from megatron.optim import GradScaler, MixedPrecisionOptimizer, build_optimizer
from megatron.training import checkpoint_source, deepspeed_checkpoint
from megatron.training.deepspeed_folders import open_newest, tags_in
from megatron.training.restore_options import EVERYTHING
from megatron.training.world import World
from tests.helpers.harness import run_ranks
from tests.helpers.runs import TOKENIZER
from tests.tds.deepspeed.test_safe_loading import Bomb

WORLD = World("cpu", torch.device("cpu"), single_grid(), 0)
STATE = {
    "progress": {"step": 1, "updates": 1, "samples_consumed": 4}, "layout": asdict(WORLD.grid.topology),
    "config": Config().to_dict(), "job": "j",
}  # fmt: skip


class FakeEngine:
    """What is asked of an engine: two files, through its checkpoint engine."""

    optimizer = SimpleNamespace(scaler=GradScaler())

    def __init__(self, value: float = 0.0, rank: int = 0) -> None:
        self.checkpoint_engine, self.value, self.rank = TorchCheckpointEngine(), value, rank

    def save_checkpoint(self, root: str, tag: str, client_state: dict[str, Any], save_latest: bool) -> None:
        assert not save_latest
        for name in ("model", "layer"):
            path = f"{root}/{tag}/{name}_{self.rank}.pt"
            self.checkpoint_engine.save(
                {"value": self.value, "weights": torch.full((99,), self.value), **client_state}, path
            )

    def load_checkpoint(self, root: str, tag: str, **options: Any) -> tuple[str, dict[str, Any]]:
        state = self.checkpoint_engine.load(f"{root}/{tag}/model_{self.rank}.pt", map_location="cpu")
        self.value = state["value"]
        return tag, state


def save_step(root: Path, step: int, retention: RetentionPolicy = KEEP_ALL) -> Path:
    return deepspeed_checkpoint.save(root, step, STATE, FakeEngine(float(step)), WORLD, retention=retention)


def load_value(path: Path) -> float:
    engine = FakeEngine()
    deepspeed_checkpoint.restore(open_newest(path, SINGLE), engine, Config(), WORLD, EVERYTHING)
    return engine.value


class SimulatedKill(BaseException):
    """Ends a save as a kill would: nothing catches it."""


def fail_after(monkeypatch: pytest.MonkeyPatch, num_allowed: int, error: BaseException) -> list[str]:
    """Raise ``error`` ahead of the operation ``num_allowed`` and of every later one; return what was begun."""
    operations: list[str] = []

    def check_operation(operation: str, path: Path) -> None:
        operations.append(f"{operation} {path.name}")
        if len(operations) > num_allowed:
            raise error

    monkeypatch.setattr(files, "before_operation", check_operation)
    return operations


def test_kill_before_any_file_operation_leaves_loadable_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows A03, A04 and A06."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it costs most of the time, and no power is lost here
    for num_allowed in range(100):
        root = tmp_path / str(num_allowed)
        save_step(root, 1)
        save_step(root, 2)
        with monkeypatch.context() as patch:
            operations = fail_after(patch, num_allowed, SimulatedKill())
            try:
                save_step(root, 3, RetentionPolicy(last=1))
                is_done = True
            except SimulatedKill:
                is_done = False
        tag_names = [path.name for path in tags_in(root)]
        assert tag_names[0] in ("global_step2", "global_step3"), operations
        assert (tag_names[0] == "global_step3") >= is_done
        assert load_value(root) == float(tag_names[0][-1])
        latest_tag = (root / "latest").read_text()  # what DeepSpeed loads
        assert latest_tag in tag_names and load_value(root / latest_tag) == float(latest_tag[-1])
        new_path = save_step(root, 3, RetentionPolicy(last=1))
        assert load_value(root) == 3.0 and (root / "latest").read_text() == new_path.name
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
        if is_done:
            assert len(operations) == num_allowed and new_path.name == "global_step3-1"
            break
    else:
        raise AssertionError("a save ends")
    assert not {"write latest", "create latest"} & set(operations), "`latest` changes by a rename only"
    assert num_allowed > 12 and len(tags_in(root)) == 1


def test_full_disk_fails_only_current_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row K10."""
    save_step(tmp_path, 1)
    for num_allowed in range(1, 9):
        with monkeypatch.context() as patch:
            operations = fail_after(patch, num_allowed, OSError(errno.ENOSPC, "No space left on device"))
            with pytest.raises(CheckpointError, match=r"step 2 was not saved to .*No space left"):
                save_step(tmp_path, 2)
        assert [path.name for path in tags_in(tmp_path)] == ["global_step1"], operations
    assert load_value(tmp_path) == 1.0
    save_step(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "global_step2", "latest"]


def _save_with_failing_rank(rank: int, root: Path) -> str:
    group = Group((0, 1), rank, torch.distributed.group.WORLD)
    grid = replace(single_grid(), topology=Topology(1, 2, 1), rank=rank, data_context=group, world=group, host=group)
    world = World("cpu", torch.device("cpu"), grid, rank)
    deepspeed_checkpoint.save(root, 1, STATE, FakeEngine(1.0, rank), world)
    if rank == 1:
        files.before_operation = lambda operation, path: _raise_io_error(path)
    with pytest.raises(CheckpointError) as raised:
        deepspeed_checkpoint.save(root, 2, STATE, FakeEngine(2.0, rank), world)
    files.before_operation = lambda operation, path: None
    client_state = FakeEngine(0.0, rank).load_checkpoint(str(root), "global_step1")[1]
    assert sorted(client_state["megatron"]["rng"]) == [0, 1]
    return str(raised.value)


def _raise_io_error(path: Path) -> None:
    raise OSError(errno.EIO, "the disk of rank 1 is gone")


def test_save_failing_on_one_rank_fails_on_all_ranks(tmp_path: Path) -> None:
    """Row K13."""
    first, second = run_ranks(2, _save_with_failing_rank, tmp_path)
    assert first == second and "rank 1: " in first and "the disk of rank 1 is gone" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]


def test_damaged_checkpoint_falls_back_to_older_one_with_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows K01, K02, K04, K07 and K08; the pointer is a hint only (A05)."""
    save_step(tmp_path, 1)
    newest = save_step(tmp_path, 2) / "model_0.pt"
    content = newest.read_bytes()
    (tmp_path / "latest").write_text("junk")
    assert load_value(tmp_path) == 2.0
    save_step(tmp_path / "back", 2)
    save_step(tmp_path / "back", 1)
    assert load_value(tmp_path / "back") == 1.0, "the newest is the last saved, also of a run that went back"
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    for damaged, message in ((content[:-1], "is truncated"), (bytes(flipped), "was altered"), (None, "No such file")):
        newest.unlink() if damaged is None else newest.write_bytes(damaged)
        assert load_value(tmp_path) == 1.0
        output = capfd.readouterr()
        assert "falling back to global_step1 (step 1)" in output.err + output.out and message in output.err + output.out
        with pytest.raises(CheckpointError, match="--strict-load"):
            open_newest(tmp_path, SINGLE, strict=True)
    (tmp_path / "global_step1" / metadata.MANIFEST_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* verifies"):
        open_newest(tmp_path, SINGLE)


def test_file_with_executable_pickle_is_rejected(tmp_path: Path) -> None:
    """Row K23: also where its checksum fits."""
    engine = FakeEngine(1.0)
    path = deepspeed_checkpoint.save(tmp_path, 1, STATE, engine, WORLD)
    torch.save({"value": Bomb(tmp_path / "mark")}, path / "model_0.pt")
    with pytest.raises(CheckpointError, match="explode"):
        deepspeed_checkpoint.restore(_read_checkpoint(path), engine, Config(), WORLD, EVERYTHING)
    assert not (tmp_path / "mark").exists() and engine.value == 1.0


def _read_checkpoint(path: Path) -> Any:
    manifest = metadata.manifest_from_bytes((path / metadata.MANIFEST_NAME).read_bytes(), path)
    from megatron.checkpoint import Checkpoint

    return Checkpoint(path, manifest)


@pytest.mark.parametrize(
    ("saved", "current", "takes_optimizer", "message"),
    [
        ((2, 1, 2), (2, 4, 2), True, None),
        ((4, 1, 1), (2, 2, 1), False, None),
        ((4, 1, 1), (2, 2, 1), True, r"saved tp1 pp4 dp1, now tp1 pp2 dp2.*native.*--load-weights-only"),
        ((2, 1, 2), (2, 2, 1), False, r"saved tp2 pp2 dp1, now tp1 pp2 dp2.*--checkpoint-format native"),
        ((1, 2, 1), (2, 1, 1), False, r"saved tp1 pp1 dp2, now tp1 pp2 dp1.*--checkpoint-format native"),
    ],
)
def test_new_layout_loads_weights_or_raises_with_both_layouts(
    saved: Any, current: Any, takes_optimizer: bool, message: str | None, tmp_path: Path
) -> None:
    """Row K15 in this format: (pipe, data, tensor)."""
    names = ("pipe", "data", "tensor")
    state = {"layout": dict(zip(names, saved, strict=True)), "config": Config().to_dict()}
    checkpoint: Any = type("Saved", (), {"metadata": state, "path": tmp_path})
    topology = Topology(**dict(zip(names, current, strict=True)))
    if message is None:
        deepspeed_checkpoint.check_layout(checkpoint, Config(), topology, loads_optimizer=takes_optimizer)
        return
    with pytest.raises(CheckpointError, match=message):
        deepspeed_checkpoint.check_layout(checkpoint, Config(), topology, loads_optimizer=takes_optimizer)


def _load_with_stock_deepspeed(rank: int, root: Path) -> tuple[bool, bool, Any, float]:
    """Save by a DeepSpeed engine with our optimizer, and load by one that knows nothing of us."""
    config = {"train_micro_batch_size_per_gpu": 1}
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = _make_optimizer(module)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    _apply_step(optimizer, module)
    path = deepspeed_checkpoint.save(root, 1, STATE, engine, WORLD)
    expected = {name: weight.clone() for name, weight in module.state_dict().items()}
    torch.manual_seed(2)
    stock_module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).bfloat16()
    stock_engine = deepspeed.initialize(
        model=stock_module, optimizer=torch.optim.SGD(stock_module.parameters(), 0.1), config=config
    )[0]
    _, client_state = stock_engine.load_checkpoint(str(root), load_optimizer_states=False)
    is_loaded = all(torch.equal(weight, expected[name]) for name, weight in stock_module.state_dict().items())
    torch.nn.init.zeros_(module[0].weight)
    with torch.no_grad():
        optimizer.main_param_of(module[0].weight).zero_()
    deepspeed_checkpoint.restore(open_newest(path, SINGLE), engine, Config(), WORLD, EVERYTHING)
    is_restored = all(torch.equal(weight, expected[name]) for name, weight in module.state_dict().items())
    return is_loaded, is_restored, client_state["megatron"]["state"]["progress"], float(optimizer.scaler.scale)


def _make_optimizer(module: torch.nn.Module, **options: Any) -> MixedPrecisionOptimizer:
    scaler = GradScaler(scale=64.0, is_dynamic=True)
    kwargs = {"dtype": torch.bfloat16, "scaler": scaler, **options}
    return build_optimizer(module.parameters(), lr=0.1, weight_decay=0.0, **kwargs)


def _apply_step(optimizer: MixedPrecisionOptimizer, module: torch.nn.Module) -> None:
    for idx, parameter in enumerate(module.parameters()):
        gradient = optimizer.gradient_of(parameter)
        assert gradient is not None
        gradient.fill_(1e-3 * (idx + 1))
    optimizer.step()


def test_stock_deepspeed_loads_weights_and_engine_restores_all_state(tmp_path: Path) -> None:
    (loaded,) = run_ranks(1, _load_with_stock_deepspeed, tmp_path)
    assert loaded == (True, True, STATE["progress"], 64.0)


def test_optimizer_state_restores_bitwise_and_rejects_mismatch(tmp_path: Path) -> None:
    modules = [torch.nn.Linear(3, 2) for _ in range(2)]
    first, second = (_make_optimizer(module) for module in modules)
    _apply_step(first, modules[0])
    first.scaler.scale = 32.0
    torch.save(first.state_dict(), tmp_path / "state")
    second.param_groups[0]["lr"] = 0.7
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert second.param_groups[0]["lr"] == 0.7 and second.param_groups[0] is second.inner.param_groups[0]
    second.param_groups[0]["lr"] = 0.1
    for _ in range(2):
        for optimizer, module in zip((first, second), modules, strict=True):
            _apply_step(optimizer, module)
    for first_param, second_param in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(first.main_param_of(first_param), second.main_param_of(second_param)) and torch.equal(
            first_param, second_param
        )
        assert not torch.equal(first_param.float(), first.main_param_of(first_param)), (
            "masters hold more than the weights"
        )
    assert second.loss_scale == 32.0
    mismatched = _make_optimizer(torch.nn.Linear(4, 2))
    for state, message in (({}, "without masters, scaler, state"), (first.state_dict(), r"\[2, 3\], now \[2, 4\]")):
        with pytest.raises(ValueError, match=message):
            mismatched.load_state_dict(state)
    with torch.no_grad():
        modules[1].weight.fill_(3.0)
    second.refresh_fp32_params()
    assert second.main_param_of(modules[1].weight).eq(3.0).all()


def test_sharded_optimizer_state_dict_is_rejected() -> None:
    optimizer = _make_optimizer(torch.nn.Linear(64, 32), data=Group((0, 1), 0), zero_stage=1)
    with pytest.raises(RuntimeError, match="ZeRO shards them. Use --checkpoint-format native"):
        optimizer.state_dict()


@pytest.mark.parametrize(
    "flags",
    ["--zero-stage 1", "--async-save", "--keep-last 2 --keep-every 5", "--no-save-optim", "--stability-guard rollback"],
)
def test_flags_unsupported_by_deepspeed_format_are_rejected(flags: str) -> None:
    argv = f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --save-interval 5 --dry-run {flags}".split()
    argv += ["--data-path", "none", "--tokenizer-path", str(TOKENIZER)]
    parse([*argv, "--checkpoint-format", "native"], world_size=1)
    with pytest.raises(ConfigError, match=r"--checkpoint-format (native|deepspeed)"):
        parse([*argv, "--checkpoint-format", "deepspeed"], world_size=1)


def test_run_folder_uses_one_checkpoint_format(tmp_path: Path) -> None:
    flags = Config().checkpoint
    assert checkpoint_source.choose_format(tmp_path, flags) == "native"
    save_step(tmp_path, 1)
    assert checkpoint_source.choose_format(tmp_path, flags) == "deepspeed"
    checkpoint_source.require_checkpoint(tmp_path)
    native_flags = type(flags)(checkpoint_format="native")
    with pytest.raises(ConfigError, match="got deepspeed ones in .* and --checkpoint-format native"):
        checkpoint_source.choose_format(tmp_path, native_flags)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="native and deepspeed ones"):
        checkpoint_source.choose_format(tmp_path, flags)
    foreign = tmp_path / "foreign"
    os.makedirs(foreign / "global_step7")
    with pytest.raises(CheckpointError, match=r"tools/import_checkpoint\.py"):
        checkpoint_source.require_checkpoint(foreign)

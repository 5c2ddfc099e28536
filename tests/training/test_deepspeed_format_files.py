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
from megatron.checkpoint.retention import ALL, RetentionPolicy
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


class Engine:
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
        found = self.checkpoint_engine.load(f"{root}/{tag}/model_{self.rank}.pt", map_location="cpu")
        self.value = found["value"]
        return tag, found


def write(root: Path, step: int, keep: RetentionPolicy = ALL) -> Path:
    return deepspeed_checkpoint.save(root, step, STATE, Engine(float(step)), WORLD, retention=keep)


def value_of(path: Path) -> float:
    engine = Engine()
    deepspeed_checkpoint.restore(open_newest(path, SINGLE), engine, Config(), WORLD, EVERYTHING)
    return engine.value


class Killed(BaseException):
    """Ends a save as a kill would: nothing catches it."""


def after(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[str]:
    """Raise ``error`` ahead of the operation ``number`` and of every later one; return what was begun."""
    seen: list[str] = []

    def stop(operation: str, path: Path) -> None:
        seen.append(f"{operation} {path.name}")
        if len(seen) > number:
            raise error

    monkeypatch.setattr(files, "before_operation", stop)
    return seen


def test_a_kill_ahead_of_any_file_operation_leaves_a_whole_checkpoint_for_both_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows A03, A04 and A06."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it costs most of the time, and no power is lost here
    for number in range(100):
        root = tmp_path / str(number)
        write(root, 1)
        write(root, 2)
        with monkeypatch.context() as patch:
            seen = after(patch, number, Killed())
            try:
                write(root, 3, RetentionPolicy(last=1))
                is_done = True
            except Killed:
                is_done = False
        left = [path.name for path in tags_in(root)]
        assert left[0] in ("global_step2", "global_step3"), seen
        assert (left[0] == "global_step3") >= is_done
        assert value_of(root) == float(left[0][-1])
        named = (root / "latest").read_text()  # what DeepSpeed loads
        assert named in left and value_of(root / named) == float(named[-1])
        again = write(root, 3, RetentionPolicy(last=1))
        assert value_of(root) == 3.0 and (root / "latest").read_text() == again.name
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
        if is_done:
            assert len(seen) == number and again.name == "global_step3-1"
            break
    else:
        raise AssertionError("a save ends")
    assert not {"write latest", "create latest"} & set(seen), "`latest` changes by a rename only"
    assert number > 12 and len(tags_in(root)) == 1


def test_a_full_disk_costs_this_save_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row K10."""
    write(tmp_path, 1)
    for number in range(1, 9):
        with monkeypatch.context() as patch:
            seen = after(patch, number, OSError(errno.ENOSPC, "No space left on device"))
            with pytest.raises(CheckpointError, match=r"step 2 was not saved to .*No space left"):
                write(tmp_path, 2)
        assert [path.name for path in tags_in(tmp_path)] == ["global_step1"], seen
    assert value_of(tmp_path) == 1.0
    write(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "global_step2", "latest"]


def _one_rank_fails(rank: int, root: Path) -> str:
    group = Group((0, 1), rank, torch.distributed.group.WORLD)
    grid = replace(single_grid(), topology=Topology(1, 2, 1), rank=rank, data_context=group, world=group, host=group)
    world = World("cpu", torch.device("cpu"), grid, rank)
    deepspeed_checkpoint.save(root, 1, STATE, Engine(1.0, rank), world)
    if rank == 1:
        files.before_operation = lambda operation, path: _fail(path)
    with pytest.raises(CheckpointError) as raised:
        deepspeed_checkpoint.save(root, 2, STATE, Engine(2.0, rank), world)
    files.before_operation = lambda operation, path: None
    client = Engine(0.0, rank).load_checkpoint(str(root), "global_step1")[1]
    assert sorted(client["megatron"]["rng"]) == [0, 1]
    return str(raised.value)


def _fail(path: Path) -> None:
    raise OSError(errno.EIO, "the disk of rank 1 is gone")


def test_a_save_that_fails_on_one_rank_is_nobodys(tmp_path: Path) -> None:
    """Row K13."""
    first, second = run_ranks(2, _one_rank_fails, tmp_path)
    assert first == second and "rank 1: " in first and "the disk of rank 1 is gone" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]


def test_damage_is_found_and_an_older_one_taken_loudly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rows K01, K02, K04, K07 and K08; the pointer is a hint only (A05)."""
    write(tmp_path, 1)
    newest = write(tmp_path, 2) / "model_0.pt"
    content = newest.read_bytes()
    (tmp_path / "latest").write_text("junk")
    assert value_of(tmp_path) == 2.0
    write(tmp_path / "back", 2)
    write(tmp_path / "back", 1)
    assert value_of(tmp_path / "back") == 1.0, "the newest is the last saved, also of a run that went back"
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    for damaged, message in ((content[:-1], "is truncated"), (bytes(flipped), "was altered"), (None, "No such file")):
        newest.unlink() if damaged is None else newest.write_bytes(damaged)
        assert value_of(tmp_path) == 1.0
        said = capfd.readouterr()
        assert "falling back to global_step1 (step 1)" in said.err + said.out and message in said.err + said.out
        with pytest.raises(CheckpointError, match="--strict-load"):
            open_newest(tmp_path, SINGLE, strict=True)
    (tmp_path / "global_step1" / metadata.MANIFEST_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* verifies"):
        open_newest(tmp_path, SINGLE)


def test_a_file_that_would_run_code_is_refused_without_a_switch(tmp_path: Path) -> None:
    """Row K23: also where its checksum fits."""
    engine = Engine(1.0)
    path = deepspeed_checkpoint.save(tmp_path, 1, STATE, engine, WORLD)
    torch.save({"value": Bomb(tmp_path / "mark")}, path / "model_0.pt")
    with pytest.raises(CheckpointError, match="explode"):
        deepspeed_checkpoint.restore(_verified(path), engine, Config(), WORLD, EVERYTHING)
    assert not (tmp_path / "mark").exists() and engine.value == 1.0


def _verified(path: Path) -> Any:
    content = metadata.manifest_from_bytes((path / metadata.MANIFEST_NAME).read_bytes(), path)
    from megatron.checkpoint import Checkpoint

    return Checkpoint(path, content)


@pytest.mark.parametrize(
    ("saved", "now", "takes_optimizer", "message"),
    [
        ((2, 1, 2), (2, 4, 2), True, None),
        ((4, 1, 1), (2, 2, 1), False, None),
        ((4, 1, 1), (2, 2, 1), True, r"saved tp1 pp4 dp1, now tp1 pp2 dp2.*native.*--load-weights-only"),
        ((2, 1, 2), (2, 2, 1), False, r"saved tp2 pp2 dp1, now tp1 pp2 dp2.*--checkpoint-format native"),
        ((1, 2, 1), (2, 1, 1), False, r"saved tp1 pp1 dp2, now tp1 pp2 dp1.*--checkpoint-format native"),
    ],
)
def test_another_layout_gets_weights_or_an_error_with_both(
    saved: Any, now: Any, takes_optimizer: bool, message: str | None, tmp_path: Path
) -> None:
    """Row K15 in this format: (pipe, data, tensor)."""
    names = ("pipe", "data", "tensor")
    state = {"layout": dict(zip(names, saved, strict=True)), "config": Config().to_dict()}
    checkpoint: Any = type("Saved", (), {"metadata": state, "path": tmp_path})
    place = Topology(**dict(zip(names, now, strict=True)))
    if message is None:
        deepspeed_checkpoint.check_layout(checkpoint, Config(), place, takes_optimizer=takes_optimizer)
        return
    with pytest.raises(CheckpointError, match=message):
        deepspeed_checkpoint.check_layout(checkpoint, Config(), place, takes_optimizer=takes_optimizer)


def _stock_reads(rank: int, root: Path) -> tuple[bool, bool, Any, float]:
    """Save by a DeepSpeed engine with our optimizer, and load by one that knows nothing of us."""
    config = {"train_micro_batch_size_per_gpu": 1}
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = _optimizer(module)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    _step(optimizer, module)
    path = deepspeed_checkpoint.save(root, 1, STATE, engine, WORLD)
    wanted = {name: weight.clone() for name, weight in module.state_dict().items()}
    torch.manual_seed(2)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).bfloat16()
    stock = deepspeed.initialize(model=plain, optimizer=torch.optim.SGD(plain.parameters(), 0.1), config=config)[0]
    _, client = stock.load_checkpoint(str(root), load_optimizer_states=False)
    same = all(torch.equal(weight, wanted[name]) for name, weight in plain.state_dict().items())
    torch.nn.init.zeros_(module[0].weight)
    with torch.no_grad():
        optimizer.main_param_of(module[0].weight).zero_()
    deepspeed_checkpoint.restore(open_newest(path, SINGLE), engine, Config(), WORLD, EVERYTHING)
    again = all(torch.equal(weight, wanted[name]) for name, weight in module.state_dict().items())
    return same, again, client["megatron"]["state"]["progress"], float(optimizer.scaler.scale)


def _optimizer(module: torch.nn.Module, **options: Any) -> MixedPrecisionOptimizer:
    scaler = GradScaler(scale=64.0, is_dynamic=True)
    given = {"dtype": torch.bfloat16, "scaler": scaler, **options}
    return build_optimizer(module.parameters(), lr=0.1, weight_decay=0.0, **given)


def _step(optimizer: MixedPrecisionOptimizer, module: torch.nn.Module) -> None:
    for number, parameter in enumerate(module.parameters()):
        gradient = optimizer.gradient_of(parameter)
        assert gradient is not None
        gradient.fill_(1e-3 * (number + 1))
    optimizer.step()


def test_stock_deepspeed_loads_the_weights_and_we_load_everything(tmp_path: Path) -> None:
    (loaded,) = run_ranks(1, _stock_reads, tmp_path)
    assert loaded == (True, True, STATE["progress"], 64.0)


def test_the_optimizer_goes_on_from_its_state_to_the_bit_and_refuses_another(tmp_path: Path) -> None:
    modules = [torch.nn.Linear(3, 2) for _ in range(2)]
    first, second = (_optimizer(module) for module in modules)
    _step(first, modules[0])
    first.scaler.scale = 32.0
    torch.save(first.state_dict(), tmp_path / "state")
    second.param_groups[0]["lr"] = 0.7
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert second.param_groups[0]["lr"] == 0.7 and second.param_groups[0] is second.inner.param_groups[0]
    second.param_groups[0]["lr"] = 0.1
    for _ in range(2):
        for optimizer, module in zip((first, second), modules, strict=True):
            _step(optimizer, module)
    for one, two in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(first.main_param_of(one), second.main_param_of(two)) and torch.equal(one, two)
        assert not torch.equal(one.float(), first.main_param_of(one)), "masters hold more than the weights"
    assert second.loss_scale == 32.0
    other = _optimizer(torch.nn.Linear(4, 2))
    for state, message in (({}, "without masters"), (first.state_dict(), r"\[2, 3\], now \[2, 4\]")):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    with torch.no_grad():
        modules[1].weight.fill_(3.0)
    second.refresh_fp32_params()
    assert second.main_param_of(modules[1].weight).eq(3.0).all()


def test_a_state_of_parts_is_refused() -> None:
    optimizer = _optimizer(torch.nn.Linear(64, 32), data=Group((0, 1), 0), zero_stage=1)
    with pytest.raises(RuntimeError, match="ZeRO shards them. Use --checkpoint-format native"):
        optimizer.state_dict()


@pytest.mark.parametrize(
    "flags",
    ["--zero-stage 1", "--async-save", "--keep-last 2 --keep-every 5", "--no-save-optim", "--stability-guard rollback"],
)
def test_what_cannot_act_in_this_format_is_refused(flags: str) -> None:
    argv = f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --save-interval 5 --dry-run {flags}".split()
    argv += ["--data-path", "none", "--tokenizer-path", str(TOKENIZER)]
    parse([*argv, "--checkpoint-format", "native"], world_size=1)
    with pytest.raises(ConfigError, match=r"--checkpoint-format (native|deepspeed)"):
        parse([*argv, "--checkpoint-format", "deepspeed"], world_size=1)


def test_a_run_folder_holds_one_format_and_names_it(tmp_path: Path) -> None:
    flags = Config().checkpoint
    assert checkpoint_source.format_of(tmp_path, flags) == "native"
    write(tmp_path, 1)
    assert checkpoint_source.format_of(tmp_path, flags) == "deepspeed"
    checkpoint_source.require_checkpoint(tmp_path)
    native = type(flags)(checkpoint_format="native")
    with pytest.raises(ConfigError, match="got deepspeed ones in .* and --checkpoint-format native"):
        checkpoint_source.format_of(tmp_path, native)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="native and deepspeed ones"):
        checkpoint_source.format_of(tmp_path, flags)
    foreign = tmp_path / "foreign"
    os.makedirs(foreign / "global_step7")
    with pytest.raises(CheckpointError, match=r"tools/import_checkpoint\.py"):
        checkpoint_source.require_checkpoint(foreign)

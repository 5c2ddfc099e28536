"""What a run writes down of itself: names, values that every layout shares, Weights & Biases."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from megatron.training.callbacks import wandb as callbacks_wandb
from megatron.training.callbacks.layer_norms import group_of
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.callbacks.speed_monitor import by_stage
from megatron.training.callbacks.wandb import Wandb, open_wandb
from megatron.training.data import RunData
from megatron.training.save_status import SaveStatus
from megatron.training.trainer import Callback, Trainer
from megatron.training.world import World
from tests.helpers.harness import run_ranks
from tests.helpers.runs import ROOT, flags, train_ranks
from tools.report import state
from tools.report_parts.runs import read_run

SHORT = "--train-iters 2 --fp64 --log-layer-norms --hidden-dropout 0 --attention-dropout 0"
LAYOUTS = {"pipe 2 x tensor 2": (4, "--pipe-parallel-size 2 --model-parallel-size 2")}
MORE_LAYOUTS = {
    "tensor 2": (2, "--model-parallel-size 2"),
    "tensor 2, sequence": (2, "--model-parallel-size 2 --sequence-parallel"),
    "pipe 2, chunks 2": (2, "--pipe-parallel-size 2 --pipeline-chunks 2 --num-layers 4"),
    "pipe 2 x data 2, ZeRO 1, untied": (
        4,
        "--pipe-parallel-size 2 --gas 1 --zero-stage 1 --untie-embeddings-and-output-weights",
    ),
    "data 2, ZeRO 2": (2, "--gas 1 --zero-stage 2"),
    "data 2, ZeRO 3": (2, "--gas 1 --zero-stage 3"),
    "bf16 x pipe 2": (2, "--pipe-parallel-size 2 --bf16"),
}
OF_EVERY_LAYOUT = ("loss", "perplexity", "tokens", "samples", "corpus_tokens", "epoch", "learning_rate", "skipped")


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the run folders of one process and of the layouts."""
    folder = tmp_path_factory.mktemp("seen")
    more = "--save-interval 1 --async-save --eval-interval 2"
    for name, (ranks, extra) in {"one process": (1, ""), **LAYOUTS}.items():
        assert train_ranks(ranks, flags(corpus, folder / name, f"{SHORT} {extra} {more}"))[0] == [0] * ranks
    return {name: folder / name for name in ("one process", *LAYOUTS)}


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float = 1e-10) -> None:
    assert len(found) == len(wanted) == 2
    for one, other in zip(found, wanted, strict=True):
        for name in OF_EVERY_LAYOUT:
            assert one[name] == pytest.approx(other[name], rel=tolerance), name
        assert one["layer_norms"] == pytest.approx(other["layer_norms"], rel=tolerance)
        squares = sum(norm**2 for norm in one["layer_norms"].values())
        assert squares == pytest.approx(one["grad_norm"] ** 2, rel=tolerance)


def test_norms_of_layers_and_what_was_read_are_the_same_in_every_layout(runs: dict[str, Path]) -> None:
    wanted = records(runs["one process"])
    names = ["embedding.position", "embedding.word", "final_norm", "layers.0", "layers.1"]
    assert list(wanted[0]["layer_norms"]) == names and all(wanted[0]["layer_norms"].values())
    for name in LAYOUTS:
        assert_same(records(runs[name]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_norms_of_layers_are_the_same_in_more_layouts(name: str, corpus: Path, tmp_path: Path) -> None:
    ranks, extra = MORE_LAYOUTS[name]
    common = SHORT.replace("--fp64", "") if "bf16" in extra else SHORT
    layout = r"--(pipe-parallel-size|model-parallel-size|pipeline-chunks|gas|zero-stage) \d|--sequence-parallel"
    alone = re.sub(layout, "", extra)
    assert train_ranks(1, flags(corpus, tmp_path / "one", f"{common} {alone}"))[0] == [0]
    assert train_ranks(ranks, flags(corpus, tmp_path / "many", f"{common} {extra}"))[0] == [0] * ranks
    assert_same(records(tmp_path / "many"), records(tmp_path / "one"), 0.02 if "bf16" in extra else 1e-10)


def test_numbers_of_a_stage_are_joined_from_its_own_ranks() -> None:
    grid = Topology.of_world(4, tensor=2, pipe=2)
    assert by_stage([1.0, 5.0, 3.0, 2.0], grid, max) == {"stage 0": 5.0, "stage 1": 3.0}


def test_each_number_of_a_record_is_what_the_page_says(runs: dict[str, Path]) -> None:
    """The formulas of docs/seeing.md."""
    last, config = records(runs["pipe 2 x tensor 2"])[-1], json.loads((runs["one process"] / "config.json").read_text())
    samples, length = last["samples"], config["batch"]["seq_length"]
    assert samples == 2 * config["batch"]["batch_size"] * config["batch"]["gas"]
    assert last["tokens"] == samples * length == sum(last["corpus_tokens"].values())
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["tokens_per_s"] * last["step_s"] == pytest.approx(samples / 2 * length, rel=1e-6)
    assert 0 < last["bubble"] < 1 and 0 < last["bubble_predicted"] < 0.5
    assert list(last["memory_bytes"]) == list(last["work_s"]) == ["stage 0", "stage 1"]
    assert all(50 * 2**20 < held < 20 * 2**30 for held in last["memory_bytes"].values())
    assert 0 < max(last["work_s"].values()) <= last["step_s"]
    stalls = [record["save_stall_s"] for record in records(runs["one process"], "save") if "save_stall_s" in record]
    written = records(runs["one process"])
    assert [written[0]["checkpoint_stall_s"], written[1]["checkpoint_stall_s"]] == [0.0, stalls[0]]


def test_names_in_the_table_of_the_page_are_those_that_runs_write(runs: dict[str, Path]) -> None:
    table = (ROOT / "docs" / "seeing.md").read_text(encoding="utf-8").split("## Every name")[1].split("\n## ")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| `")]
    documented: dict[str, set[str]] = {}
    for names, kinds, _ in rows:
        for kind in kinds.split(","):
            documented.setdefault(kind.strip(), set()).update(re.findall(r"`(\w[\w ]*)`", names))
    elsewhere = {
        "train": {
            "epochs",
            "seq_length",
            "lr",
            "z_loss",
            "moe_aux_loss",
            "moe_z_loss",
            "moe_load_imbalance",
            "moe_entropy",
            "moe_dropped",
            "moe_tokens_per_expert",
            "mlm loss",
            "nsp loss",
            "compile_s",
            "graphs_compiled",
            "graphs_cached",
        },
        "valid": {"losses"},
        "test": {"losses"},
        "save": {"failed"},
    }
    for kind in ("train", "valid", "test", "save"):
        written = {name for folder in runs.values() for record in records(folder, kind) for name in record}
        assert written - {"kind", "step"} == documented[kind] - elsewhere[kind], kind
    assert set(documented) == set(elsewhere)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard finds in a run folder: tag -> (step, value) in the order of writing."""
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_shows_each_number_of_the_file_under_kind_and_name(runs: dict[str, Path]) -> None:
    for folder in runs.values():
        wanted: dict[str, list[tuple[int, float]]] = {}
        for record in read_metrics(folder / "metrics.jsonl"):
            for name, value in record.items():
                inner = value if isinstance(value, dict) else {"": value}
                for key, number in inner.items():
                    if name not in ("kind", "step") and isinstance(number, int | float):
                        tag = "/".join(filter(None, (record["kind"], name, key)))
                        wanted.setdefault(tag, []).append((record["step"], number))
        shown = events(folder)
        assert set(shown) == set(wanted) and {"train/loss", "valid/loss", "train/layer_norms/layers.1"} <= set(shown)
        for tag, points in wanted.items():
            assert [step for step, _ in shown[tag]] == [step for step, _ in points], tag
            numbers = [number for _, number in points]
            assert [value for _, value in shown[tag]] == pytest.approx(numbers, rel=1e-6, abs=1e-30), tag


def test_every_start_leaves_its_line_and_each_stage_its_row(runs: dict[str, Path]) -> None:
    folder = runs["pipe 2 x tensor 2"]
    (start,) = map(json.loads, (folder / "starts.jsonl").read_text().splitlines())
    assert (start["step"], start["ranks"]) == (0, 4) and start["time"] > 1.7e9
    stages = json.loads((folder / "stages.json").read_text())
    assert [row["stage"] for row in stages] == [0, 1] and [row["ranks"] for row in stages] == [2, 2]
    assert all(row["parameters"] > 0 and row["estimated_bytes"] > 0 for row in stages)
    assert stages[0]["layers"].startswith("layers 0-")


def test_waits_for_saves_are_told_once() -> None:
    saves = SaveStatus()
    saves.record_stall(0.25)
    saves.record_stall(0.5)
    assert (saves.drain_stalled_s(), saves.drain_stalled_s()) == (0.75, 0.0)


@pytest.mark.parametrize(
    "name, group",
    [
        ("layers.3.attention.dense.weight", "layers.3"),
        ("encoder.layers.12.mlp.up.bias", "encoder.layers.12"),
        ("embedding.word.weight", "embedding.word"),
        ("decoder.final_norm.weight", "decoder.final_norm"),
        ("0.weight", "0"),
        ("scale", "scale"),
    ],
)
def test_a_group_is_the_layer_or_else_the_module(name: str, group: str) -> None:
    assert group_of(name) == group


@pytest.mark.parametrize("draws", [True, False])
def test_a_run_that_an_error_ends_has_failed_at_wandb(draws: bool, wandb: StandIn, tmp_path: Path) -> None:
    callback = Wandb()
    callback._open(config_with("--wandb-project p"), tmp_path)
    if draws:
        callback.on_train_end()
    else:
        callback.on_exception(ValueError())
    assert wandb.calls[-1] == ("finish", int(not draws))


class StandIn:
    """A module ``wandb`` that notes what it is asked for."""

    def __init__(self, error: str = "") -> None:
        self.error, self.calls = error, []  # type: ignore[var-annotated]
        self.run = SimpleNamespace(
            id="abc",
            log=self._log,
            define_metric=lambda *names, **more: self.calls.append(("define", names, more)),
            finish=lambda exit_code: self.calls.append(("finish", exit_code)),
        )

    def init(self, **given: Any) -> Any:
        if self.error:
            raise RuntimeError(self.error)
        self.calls.append(("init", given))
        return self.run

    def _log(self, numbers: dict[str, float]) -> None:
        if any(math.isnan(number) for number in numbers.values()):
            raise OSError("the network is down")
        self.calls.append(("log", numbers))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", made)  # type: ignore[arg-type]
    return made


def config_with(extra: str) -> Any:
    return parse(f"--data-path none --dry-run --vocab-size 9 {extra}".split(), world_size=1)


def test_wandb_gets_each_number_by_the_step_that_it_is_of(wandb: StandIn, tmp_path: Path) -> None:
    run = open_wandb(config_with("--wandb-project p --wandb-name n --wandb-entity e"), tmp_path)
    assert run is not None
    run.write("train", 3, {"train/loss": 2.5})
    run.write("train", 2, {"train/loss": 2.25})
    run.close()
    kind, given = wandb.calls[0]
    assert (kind, given["project"], given["name"], given["entity"]) == ("init", "p", "n", "e")
    assert (given["id"], given["resume"], given["dir"]) == (None, "allow", str(tmp_path))
    assert given["config"]["run"]["seed"] == 1234
    assert ("define", ("train/*",), {"step_metric": "train/step"}) in wandb.calls
    logs = wandb.calls[-3:-1]
    assert logs == [("log", {"train/loss": 2.5, "train/step": 3}), ("log", {"train/loss": 2.25, "train/step": 2})]
    assert wandb.calls[-1] == ("finish", 0)


def test_a_run_that_goes_on_is_the_same_at_wandb_and_has_the_folders_name(wandb: StandIn, tmp_path: Path) -> None:
    config = config_with(f"--wandb-project p --wandb-save-dir {tmp_path / 'made' / 'w'}")
    for wanted in (None, "abc"):
        wandb.calls.clear()
        assert open_wandb(config, tmp_path) is not None
        given = wandb.calls[0][1]
        assert (given["id"], given["name"], given["dir"]) == (wanted, tmp_path.name, str(tmp_path / "made" / "w"))
    assert (tmp_path / "made" / "w").is_dir()


def test_what_wandb_cannot_start_is_an_error_and_what_it_cannot_send_a_warning(
    wandb: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert open_wandb(config_with(""), tmp_path) is None and not wandb.calls
    run = open_wandb(config_with("--wandb-project p"), tmp_path)
    assert run is not None
    for number in (math.nan, 1.0):
        run.write("train", 1, {"train/loss": number})
    run.close()
    assert capsys.readouterr().err.count("no further records are sent to Weights & Biases (OSError: the network") == 1
    assert not [call for call in wandb.calls if call[0] in ("log", "finish")]
    wandb.error = "not logged in"
    with pytest.raises(ConfigError, match="--wandb-project p must be .* got RuntimeError: not logged in. Run wandb"):
        open_wandb(config_with("--wandb-project p"), tmp_path)


def test_wandb_itself_takes_these_calls_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        run = open_wandb(config_with("--wandb-project p"), tmp_path)
        assert run is not None
        run.write("train", 1, {"train/loss": 2.5})
        run.close()
    name = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb"))) >= 1


def test_no_run_waits_for_wandb_without_an_end(
    wandb: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks_wandb, "PATIENCE_S", 0.05)
    run = open_wandb(config_with("--wandb-project p"), tmp_path)
    assert run is not None
    end = threading.Event()
    wandb.run.finish = lambda exit_code: end.wait(20) or wandb.calls.append(("ended late", exit_code))
    run.close()
    end.set()
    assert not [call for call in wandb.calls if call[0] == "ended late"]
    assert "did not receive all records within 0.05 s" in capsys.readouterr().err


def test_an_id_of_wandb_that_cannot_be_written_is_a_warning(
    wandb: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron.files.replace_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert open_wandb(config_with("--wandb-project p"), tmp_path) is not None
    assert "wandb.json could not be written ([Errno 28] full)" in capsys.readouterr().err


def close_slowly(rank: int) -> float:
    class Slow(Callback):
        on_all_ranks = False

        def on_train_end(self) -> None:
            time.sleep(1.0)

    world = World("cpu", torch.device("cpu"), build_grid(Topology.of_world(2, tensor=1, pipe=1), rank), rank)
    config = config_with("--load none --eval-only")
    engine: Any = SimpleNamespace()
    began = time.monotonic()
    Trainer(config, world, engine, RunData({}, None), Path(), [Slow()]).fit()
    return time.monotonic() - began


def test_no_rank_leaves_while_rank_0_closes_its_reports() -> None:
    assert min(run_ranks(2, close_slowly)) > 0.7


def plant_wandb(folder: Path) -> Any:
    """Return a plant: a stand-in in each rank, and at the end of rank 0 a file of what it was asked for."""

    def plant(rank: int) -> None:
        made = StandIn()
        sys.modules["wandb"] = made  # type: ignore[assignment]
        made.run.finish = lambda exit_code: (folder / f"calls-{rank}.json").write_text(json.dumps(made.calls))

    return plant


@pytest.mark.slow
def test_a_run_sends_what_its_file_holds_from_rank_0_alone(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", StandIn())  # type: ignore[arg-type]
    argv = flags(corpus, tmp_path / "run", "--train-iters 2 --pipe-parallel-size 2 --wandb-project p")
    assert train_ranks(2, argv, plant_wandb(tmp_path))[0] == [0, 0]
    (calls,) = [json.loads(path.read_text()) for path in tmp_path.glob("calls-*.json")]
    sent = [call[1] for call in calls if call[0] == "log"]
    written = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [numbers.get("train/loss") for numbers in sent] == [
        record["loss"] if record["kind"] == "train" else None for record in written
    ]
    assert sent[0]["train/memory_bytes/stage 1"] == written[0]["memory_bytes"]["stage 1"]
    assert json.loads((tmp_path / "run" / "wandb.json").read_text()) == {"id": "abc"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_evaluation_leaves_what_its_folder_says_of_the_run(
    runs: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(runs["one process"], folder)
    before = contents(folder)
    evaluating = f"{SHORT.replace('--log-layer-norms', '')} --train-iters 9 --eval-only --load {folder}"
    for _ in range(2):
        assert train_ranks(1, flags(corpus, folder, evaluating))[0] == [0]
    after = contents(folder)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"evaluations.jsonl"}
    found = read_metrics(folder / "evaluations.jsonl")
    (tested,) = records(folder, "test")
    assert [(each["kind"], each["step"], each["loss"]) for each in found] == [("test", 2, tested["loss"])] * 2
    assert found[0]["checkpoint"].endswith("step-00000002") and found[0]["config"]["batch"]["train_iters"] == 9
    assert state(read_run(folder, "mine")) == ("finished",)


def test_an_evaluation_of_a_checkpoint_alone_makes_a_folder_with_its_result(
    runs: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    checkpoint, folder = tmp_path / "step-00000001", tmp_path / "evaluated"
    shutil.copytree(runs["one process"] / "checkpoints" / checkpoint.name, checkpoint)
    evaluating = f"{SHORT.replace('--log-layer-norms', '')} --eval-only --load {checkpoint}"
    assert train_ranks(1, flags(corpus, folder, f"{evaluating} --tensorboard-dir {tmp_path / 'events'}"))[0] == [0]
    assert set(contents(folder)) == {"evaluations.jsonl"}
    run = read_run(folder, "evaluated")
    assert (state(run), run.setting("model", "hidden_size"), run.notes) == (("evaluated",), 32, [])
    assert any((tmp_path / "events").iterdir())


def test_an_evaluation_keeps_the_results_of_later_steps(
    runs: dict[str, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the launcher has started again."""
    folder = tmp_path / "evaluated"
    folder.mkdir()
    (folder / "evaluations.jsonl").write_text('{"kind":"test","step":99,"loss":1.0}\n')
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    evaluating = f"{SHORT.replace('--log-layer-norms', '')} --eval-only --load".split()
    command = [*flags(corpus, folder), *evaluating, str(runs["one process"])]
    assert train_ranks(1, command)[0] == [0]
    assert [each["step"] for each in read_metrics(folder / "evaluations.jsonl")] == [99, 2]


def test_what_a_rank_held_before_the_model_stands_beside_what_is_estimated(runs: dict[str, Path]) -> None:
    for name, stages in (("one process", 1), ("pipe 2 x tensor 2", 2)):
        facts = json.loads((runs[name] / "stages.json").read_text())
        held = records(runs[name])[-1]["memory_bytes"]
        assert len(facts) == stages
        assert all(10 << 20 < each["before_bytes"] <= held[f"stage {each['stage']}"] for each in facts)
        for each in facts:
            assert (
                sum(bytes_ for part, bytes_ in each["estimated_parts"].items() if part != "host")
                == each["estimated_bytes"]
            )


def test_an_evaluation_is_a_run_of_its_own_at_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / callbacks_wandb.NAME).write_text('{"id": "of training"}')
    asked: list[Any] = []

    def init(**how: Any) -> Any:
        asked.append(how["id"])
        return SimpleNamespace(id="new", define_metric=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    open_wandb(config_with("--wandb-project p --eval-only --load x"), tmp_path)
    assert asked == [None] and json.loads((tmp_path / callbacks_wandb.NAME).read_text()) == {"id": "of training"}
    open_wandb(config_with("--wandb-project p"), tmp_path)
    assert asked == [None, "of training"]

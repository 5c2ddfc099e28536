"""What a run writes down of itself: names, values that every layout shares, Weights & Biases."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config import parse
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from megatron.training.callbacks.layer_norms import group_of
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.callbacks.speed_monitor import by_stage
from megatron.training.data import RunData
from megatron.training.save_status import SaveStatus
from megatron.training.trainer import Callback, Trainer
from megatron.training.world import World
from tests.helpers.fake_trackers import FakeWandb
from tests.helpers.harness import run_ranks
from tests.helpers.runs import ROOT, make_flags, train_ranks
from tools.report import describe_state
from tools.report_parts.runs import read_run

SHORT_RUN_FLAGS = "--train-iters 2 --fp64 --log-layer-norms --hidden-dropout 0 --attention-dropout 0"
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
LAYOUT_INVARIANT_FIELDS = (
    "loss",
    "perplexity",
    "tokens",
    "samples",
    "corpus_tokens",
    "epoch",
    "learning_rate",
    "skipped",
)


def read_records(folder: Path, record_type: str = "train") -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == record_type]


@pytest.fixture(scope="module")
def run_dirs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the run folders of one process and of the layouts."""
    folder = tmp_path_factory.mktemp("seen")
    save_flags = "--save-interval 1 --async-save --eval-interval 2"
    for name, (num_ranks, layout_flags) in {"one process": (1, ""), **LAYOUTS}.items():
        assert (
            train_ranks(num_ranks, make_flags(corpus, folder / name, f"{SHORT_RUN_FLAGS} {layout_flags} {save_flags}"))[
                0
            ]
            == [0] * num_ranks
        )
    return {name: folder / name for name in ("one process", *LAYOUTS)}


def assert_equal_records(
    actual: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-10
) -> None:
    assert len(actual) == len(expected) == 2
    for record, expected_record in zip(actual, expected, strict=True):
        for name in LAYOUT_INVARIANT_FIELDS:
            assert record[name] == pytest.approx(expected_record[name], rel=tolerance), name
        assert record["layer_norms"] == pytest.approx(expected_record["layer_norms"], rel=tolerance)
        squares = sum(norm**2 for norm in record["layer_norms"].values())
        assert squares == pytest.approx(record["grad_norm"] ** 2, rel=tolerance)


def test_layer_norms_and_counts_are_equal_in_all_layouts(run_dirs: dict[str, Path]) -> None:
    expected = read_records(run_dirs["one process"])
    names = ["embedding.position", "embedding.word", "final_norm", "layers.0", "layers.1"]
    assert list(expected[0]["layer_norms"]) == names and all(expected[0]["layer_norms"].values())
    for name in LAYOUTS:
        assert_equal_records(read_records(run_dirs[name]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_layer_norms_are_equal_in_more_layouts(name: str, corpus: Path, tmp_path: Path) -> None:
    num_ranks, layout_flags = MORE_LAYOUTS[name]
    base_flags = SHORT_RUN_FLAGS.replace("--fp64", "") if "bf16" in layout_flags else SHORT_RUN_FLAGS
    layout_pattern = r"--(pipe-parallel-size|model-parallel-size|pipeline-chunks|gas|zero-stage) \d|--sequence-parallel"
    single_rank_flags = re.sub(layout_pattern, "", layout_flags)
    assert train_ranks(1, make_flags(corpus, tmp_path / "one", f"{base_flags} {single_rank_flags}"))[0] == [0]
    assert (
        train_ranks(num_ranks, make_flags(corpus, tmp_path / "many", f"{base_flags} {layout_flags}"))[0]
        == [0] * num_ranks
    )
    assert_equal_records(
        read_records(tmp_path / "many"), read_records(tmp_path / "one"), 0.02 if "bf16" in layout_flags else 1e-10
    )


def test_stage_values_are_reduced_over_stage_ranks() -> None:
    topology = Topology.from_world_size(4, tensor=2, pipe=2)
    assert by_stage([1.0, 5.0, 3.0, 2.0], topology, max) == {"stage 0": 5.0, "stage 1": 3.0}


def test_recorded_values_follow_documented_formulas(run_dirs: dict[str, Path]) -> None:
    """The formulas of docs/monitoring.md."""
    last_record, config = (
        read_records(run_dirs["pipe 2 x tensor 2"])[-1],
        json.loads((run_dirs["one process"] / "config.json").read_text()),
    )
    num_samples, seq_length = last_record["samples"], config["batch"]["seq_length"]
    assert num_samples == 2 * config["batch"]["batch_size"] * config["batch"]["gas"]
    assert last_record["tokens"] == num_samples * seq_length == sum(last_record["corpus_tokens"].values())
    assert last_record["perplexity"] == pytest.approx(math.exp(last_record["loss"]))
    assert last_record["tokens_per_s"] * last_record["step_s"] == pytest.approx(num_samples / 2 * seq_length, rel=1e-6)
    assert 0 < last_record["bubble"] < 1 and 0 < last_record["bubble_predicted"] < 0.5
    assert list(last_record["memory_bytes"]) == list(last_record["work_s"]) == ["stage 0", "stage 1"]
    assert all(50 * 2**20 < num_bytes < 20 * 2**30 for num_bytes in last_record["memory_bytes"].values())
    assert 0 < max(last_record["work_s"].values()) <= last_record["step_s"]
    stalls_s = [
        record["save_stall_s"] for record in read_records(run_dirs["one process"], "save") if "save_stall_s" in record
    ]
    train_records = read_records(run_dirs["one process"])
    assert [train_records[0]["checkpoint_stall_s"], train_records[1]["checkpoint_stall_s"]] == [0.0, stalls_s[0]]


def test_documented_names_equal_recorded_names(run_dirs: dict[str, Path]) -> None:
    table = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8").split("## All metrics")[1].split("\n## ")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| `")]
    documented: dict[str, set[str]] = {}
    for names, record_types, _ in rows:
        for record_type in record_types.split(","):
            documented.setdefault(record_type.strip(), set()).update(re.findall(r"`(\w[\w ]*)`", names))
    of_other_runs = {
        "train": {
            "epochs",
            "seq_length",
            "weight_decay",
            "max_attention_logit",
            "lr",
            "z_loss",
            "mtp_1_loss",
            "moe_aux_loss",
            "moe_z_loss",
            "load_balancing_loss",
            "seq_load_balancing_loss",
            "global_load_balancing_loss",
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
    for record_type in ("train", "valid", "test", "save"):
        written_names = {
            name for folder in run_dirs.values() for record in read_records(folder, record_type) for name in record
        }
        assert written_names - {"kind", "step"} == documented[record_type] - of_other_runs[record_type], record_type
    assert set(documented) == set(of_other_runs)


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard finds in a run folder: tag -> (step, value) in the order of writing."""
    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_scalars_equal_metrics_file(run_dirs: dict[str, Path]) -> None:
    for folder in run_dirs.values():
        expected: dict[str, list[tuple[int, float]]] = {}
        for record in read_metrics(folder / "metrics.jsonl"):
            for name, value in record.items():
                values_by_key = value if isinstance(value, dict) else {"": value}
                for key, scalar in values_by_key.items():
                    if name not in ("kind", "step") and isinstance(scalar, int | float):
                        tag = "/".join(filter(None, (record["kind"], name, key)))
                        expected.setdefault(tag, []).append((record["step"], scalar))
        actual = read_events(folder)
        assert set(actual) == set(expected) and {"train/loss", "valid/loss", "train/layer_norms/layers.1"} <= set(
            actual
        )
        for tag, points in expected.items():
            assert [step for step, _ in actual[tag]] == [step for step, _ in points], tag
            expected_values = [scalar for _, scalar in points]
            assert [value for _, value in actual[tag]] == pytest.approx(expected_values, rel=1e-6, abs=1e-30), tag


def test_start_and_stages_are_recorded(run_dirs: dict[str, Path]) -> None:
    folder = run_dirs["pipe 2 x tensor 2"]
    (start,) = map(json.loads, (folder / "starts.jsonl").read_text().splitlines())
    assert (start["step"], start["ranks"]) == (0, 4) and start["time"] > 1.7e9
    stages = json.loads((folder / "stages.json").read_text())
    assert [row["stage"] for row in stages] == [0, 1] and [row["ranks"] for row in stages] == [2, 2]
    assert all(row["parameters"] > 0 and row["estimated_bytes"] > 0 for row in stages)
    assert stages[0]["layers"].startswith("layers 0-")


def test_save_stall_is_drained_once() -> None:
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
def test_norm_group_is_layer_or_module(name: str, group: str) -> None:
    assert group_of(name) == group


def make_config(extra: str) -> Any:
    return parse(f"--data-path none --dry-run --vocab-size 9 {extra}".split(), world_size=1)


def time_slow_close(rank: int) -> float:
    class SlowReport(Callback):
        on_all_ranks = False

        def on_train_end(self) -> None:
            time.sleep(1.0)

    world = World("cpu", torch.device("cpu"), build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank), rank)
    config = make_config("--load none --eval-only")
    engine: Any = SimpleNamespace()
    start = time.monotonic()
    Trainer(config, world, engine, RunData({}, None), Path(), [SlowReport()]).fit()
    return time.monotonic() - start


def test_all_ranks_wait_until_rank_0_closes_reports() -> None:
    assert min(run_ranks(2, time_slow_close)) > 0.7


def make_wandb_injector(folder: Path) -> Any:
    """Return a plant: a stand-in in each rank, and at the end of rank 0 a file of what it was asked for."""

    def inject(rank: int) -> None:
        fake = FakeWandb()
        sys.modules["wandb"] = fake  # type: ignore[assignment]
        fake.run.finish = lambda exit_code: (folder / f"calls-{rank}.json").write_text(json.dumps(fake.calls))

    return inject


@pytest.mark.slow
def test_only_rank_0_sends_recorded_values_to_wandb(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())  # type: ignore[arg-type]
    argv = make_flags(corpus, tmp_path / "run", "--train-iters 2 --pipe-parallel-size 2 --wandb-project p")
    assert train_ranks(2, argv, make_wandb_injector(tmp_path))[0] == [0, 0]
    (calls,) = [json.loads(path.read_text()) for path in tmp_path.glob("calls-*.json")]
    sent_values = [call[1] for call in calls if call[0] == "log"]
    written_records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [values.get("train/loss") for values in sent_values] == [
        record["loss"] if record["kind"] == "train" else None for record in written_records
    ]
    assert sent_values[0]["train/memory_bytes/stage 1"] == written_records[0]["memory_bytes"]["stage 1"]
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["id"] == "abc"


def read_contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_evaluation_preserves_run_files(run_dirs: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(run_dirs["one process"], folder)
    before = read_contents(folder)
    eval_flags = f"{SHORT_RUN_FLAGS.replace('--log-layer-norms', '')} --train-iters 9 --eval-only --load {folder}"
    for _ in range(2):
        assert train_ranks(1, make_flags(corpus, folder, eval_flags))[0] == [0]
    after = read_contents(folder)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"evaluations.jsonl"}
    evaluations = read_metrics(folder / "evaluations.jsonl")
    (test_record,) = read_records(folder, "test")
    assert [(evaluation["kind"], evaluation["step"], evaluation["loss"]) for evaluation in evaluations] == [
        ("test", 2, test_record["loss"])
    ] * 2
    assert (
        evaluations[0]["checkpoint"].endswith("step-00000002") and evaluations[0]["config"]["batch"]["train_iters"] == 9
    )
    assert describe_state(read_run(folder, "mine")) == ("finished",)


def test_evaluation_of_single_checkpoint_writes_result_folder(
    run_dirs: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    checkpoint, folder = tmp_path / "step-00000001", tmp_path / "evaluated"
    shutil.copytree(run_dirs["one process"] / "checkpoints" / checkpoint.name, checkpoint)
    eval_flags = f"{SHORT_RUN_FLAGS.replace('--log-layer-norms', '')} --eval-only --load {checkpoint}"
    assert train_ranks(1, make_flags(corpus, folder, f"{eval_flags} --tensorboard-dir {tmp_path / 'events'}"))[0] == [0]
    assert set(read_contents(folder)) == {"evaluations.jsonl"}
    run = read_run(folder, "evaluated")
    assert (describe_state(run), run.setting("model", "hidden_size"), run.notes) == (("evaluated",), 32, [])
    assert any((tmp_path / "events").iterdir())


def test_evaluation_preserves_results_of_later_steps(
    run_dirs: dict[str, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the launcher has started again."""
    folder = tmp_path / "evaluated"
    folder.mkdir()
    (folder / "evaluations.jsonl").write_text('{"kind":"test","step":99,"loss":1.0}\n')
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    eval_flags = f"{SHORT_RUN_FLAGS.replace('--log-layer-norms', '')} --eval-only --load".split()
    command = [*make_flags(corpus, folder), *eval_flags, str(run_dirs["one process"])]
    assert train_ranks(1, command)[0] == [0]
    assert [record["step"] for record in read_metrics(folder / "evaluations.jsonl")] == [99, 2]


def test_bytes_before_model_do_not_exceed_recorded_memory(run_dirs: dict[str, Path]) -> None:
    for name, num_stages in (("one process", 1), ("pipe 2 x tensor 2", 2)):
        entries = json.loads((run_dirs[name] / "stages.json").read_text())
        memory_bytes = read_records(run_dirs[name])[-1]["memory_bytes"]
        assert len(entries) == num_stages
        assert all(10 << 20 < entry["before_bytes"] <= memory_bytes[f"stage {entry['stage']}"] for entry in entries)
        for entry in entries:
            assert (
                sum(bytes_ for component, bytes_ in entry["estimated_parts"].items() if component != "host")
                == entry["estimated_bytes"]
            )

"""Dumps of runs: they change no bit, hold each tensor once, and those of two layouts agree or name the wrong module."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pretrain_t5
from examples.bert import pretrain_bert
from examples.llama import pretrain_llama
from examples.mpt import pretrain_mpt
from megatron.debug.compare import compare, group_records, pair_tensors
from megatron.debug.dump_files import DumpWriter, SampleRange, read_dump, write_manifest
from megatron.debug.statistics import ShardSlice
from megatron.models.common.parameters import named_modules
from tests.helpers import dumps
from tools import compare_dumps

RECOMPUTED = "--fp64 --pipeline-schedule zb-h1 --checkpoint-activations"
MANIFEST = {"layout": {}, "family": "gpt2", "micro_batch_size": 1, "world_size": 1, "ranks": [], "dtype": "fp32"}


@pytest.fixture(scope="module")
def single_process_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of one process, of two steps."""
    folder = tmp_path_factory.mktemp("one")
    dumps.train_with_dumps(folder, gas=2, extra="--fp64 --debug-dump-steps 1-3")
    return folder


def scale_one_layer(model: torch.nn.Module) -> None:
    """Let one layer of the model give a thousandth more than it should."""
    for name, module in named_modules(model):
        if name == "layers.1.attention.dense":
            original_forward = module.forward
            module.forward = lambda x, original_forward=original_forward: 1.001 * original_forward(x)  # type: ignore[method-assign]


def run_compare_tool(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Return the exit code of the tool."""
    monkeypatch.setattr(sys, "argv", ["compare_dumps.py", *map(str, arguments)])
    try:
        return compare_dumps.main()
    except SystemExit as error:
        return int(error.code or 0)


def assert_dumps_agree(first: Path, second: Path, rtol: float | None = None) -> None:
    """Check that the dumps agree in all tensors of the first but those that only single-stage models have."""
    first_dump, second_dump = read_dump(first), read_dump(second)
    comparison = compare(first_dump, second_dump, rtol)
    assert comparison.first is None, compare_dumps.verdict(comparison)
    assert {key.name for key in comparison.only_first} <= {"encoder", "decoder"}
    counts = Counter(key.tensor_type for key in group_records(first_dump))
    assert (
        min(
            counts[tensor_type]
            for tensor_type in ("weight", "input", "output", "grad_output", "grad_input", "gradient")
        )
        > 20
    )
    assert not any(difference.differing_copies for difference in comparison.differences)


@pytest.mark.slow  # dumps beside the steps change no bit: tests/training/test_side_effects.py
def test_dump_changes_no_bit_and_stores_each_tensor_once(single_process_dump: Path, tmp_path: Path) -> None:
    traces = dumps.train_with_dumps(tmp_path / "two", (1, 2, 1), gas=4, extra=RECOMPUTED)
    plain_traces = dumps.train_with_dumps(None, (1, 2, 1), gas=4, extra=RECOMPUTED)
    for dumped, plain_trace in zip(traces, plain_traces, strict=True):
        assert (dumped.losses, dumped.grad_norms) == (plain_trace.losses, plain_trace.grad_norms)
        assert all(torch.equal(dumped.weights[name][1], tensor) for name, (_, tensor) in plain_trace.weights.items())
    two_stage_dump = read_dump(tmp_path / "two")
    record_counts = Counter(
        (record.rank, record.step, record.what, record.name, record.call, record.index, record.micro_batch)
        for record in two_stage_dump.records
    )
    assert set(record_counts.values()) == {1}
    micro_batches = {
        (record.micro_batch, record.samples) for record in two_stage_dump.records if record.samples is not None
    }
    assert micro_batches == {(idx, SampleRange(2 * idx, 2 * idx + 2)) for idx in range(4)}
    assert [two_stage_dump.ends[step]["loss"] for step in (1, 2)] == traces[0].losses
    assert_dumps_agree(single_process_dump, tmp_path / "two")


def test_wrong_layer_on_two_tensor_ranks_is_named(
    single_process_dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dumps.train_with_dumps(tmp_path / "wrong", (2, 1, 1), gas=4, inject_fault=scale_one_layer, steps=1)
    assert run_compare_tool(monkeypatch, single_process_dump, tmp_path / "wrong", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    first_difference = report["first_difference"]
    assert (first_difference["name"], first_difference["what"], first_difference["phase"]) == (
        "layers.1.attention.dense",
        "output",
        "forward",
    )
    assert 5e-4 < first_difference["error"] < 2e-3 and not report["equal"]
    differing_names = {row["name"] for row in report["tensors"] if row["differs"] and row["phase"] == "forward"}
    assert differing_names == {
        "layers.1.attention.dense", "layers.1.attention", "layers.1.post_attention_norm", "layers.1.mlp.up",
        "layers.1.mlp.down", "layers.1.mlp", "layers.1", "final_norm",
    }  # fmt: skip
    assert run_compare_tool(monkeypatch, single_process_dump, tmp_path / "wrong", "--json", "--rtol", "0.1") == 0
    capsys.readouterr()
    assert run_compare_tool(monkeypatch, single_process_dump, tmp_path / "wrong") == 1
    assert (tmp_path / "wrong" / "compare.png").read_bytes().startswith(b"\x89PNG")
    stdout = capsys.readouterr().out
    assert "verdict: first difference: output of layers.1.attention.dense in step 1, forward" in stdout
    assert "tensor 2, pipe 1, data 1" in stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pretrain_llama,
        pretrain_mpt,
        pretrain_bert,
    ],
    ids=lambda script: script.__name__,
)
def test_other_families_agree_across_tensor_and_pipeline_ranks(tmp_path: Path, script: ModuleType) -> None:
    layouts = {"one": (1, 1, 1), "slices": (2, 1, 1), "stages": (1, 2, 1)}
    for name, layout in layouts.items():
        dumps.train_with_dumps(tmp_path / name, layout, gas=2, script=script)
        assert_dumps_agree(tmp_path / "one", tmp_path / name)
    if script is not pretrain_bert:
        records = [
            record
            for record in read_dump(tmp_path / "slices").records
            if (record.name, record.what) == ("layers.1.mlp.up", "output")
        ]
        shard_size = records[0].shape[-1]
        assert {(record.index, record.cut) for record in records} == {
            (index, ShardSlice(2, start, shard_size, 2 * shard_size)) for index in (0, 1) for start in (0, shard_size)
        }
        pairs = pair_tensors(read_dump(tmp_path / "one"), read_dump(tmp_path / "stages"))
        assert {first.key.index for first, _ in pairs if first.key.name == "layers.1.mlp.up"} == {0, 1}


@pytest.mark.slow
def test_sequence_shards_agree_with_single_process(single_process_dump: Path, tmp_path: Path) -> None:
    """Rows add up as columns do, so that the sketches of parts see what those of the whole see."""
    dumps.train_with_dumps(tmp_path / "parts", (2, 1, 1), gas=4, extra="--fp64 --sequence-parallel")
    assert_dumps_agree(single_process_dump, tmp_path / "parts")
    for name in ("embedding", "layers.0.input_norm", "layers.0.attention.dense", "layers.0", "final_norm"):
        records = [
            record for record in read_dump(tmp_path / "parts").records if (record.name, record.what) == (name, "output")
        ]
        assert {record.cut for record in records} == {ShardSlice(0, 0, 4, 8), ShardSlice(0, 4, 4, 8)}, name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("script", [pretrain_llama, pretrain_mpt, pretrain_bert, pretrain_t5], ids=lambda s: s.__name__)
def test_sequence_shards_of_other_families_agree(
    tmp_path: Path, script: ModuleType, layout: tuple[int, int, int]
) -> None:
    dumps.train_with_dumps(tmp_path / "one", gas=2, script=script)
    dumps.train_with_dumps(tmp_path / "parts", layout, gas=4, extra="--fp64 --sequence-parallel", script=script)
    assert_dumps_agree(tmp_path / "one", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("script", [pretrain_bert, pretrain_t5], ids=lambda s: s.__name__)
def test_partial_sums_and_rows_without_gradient_form_full_tensors(tmp_path: Path, script: ModuleType) -> None:
    """The layers of T5's decoder, all on the second stage, hand on memory, whose gradient between them is a share."""
    tensors = "--fp64 --debug-dump-tensors --debug-dump-steps 1 --debug-dump-modules ^(decoder|next) "
    tensors += "--partition-method type:layer"
    dumps.train_with_dumps(tmp_path / "one", (1, 2, 1), gas=4, steps=1, extra=tensors, script=script)
    dumps.train_with_dumps(
        tmp_path / "parts", (2, 2, 1), gas=4, steps=1, extra=f"{tensors} --sequence-parallel", script=script
    )
    comparison = compare(read_dump(tmp_path / "one"), read_dump(tmp_path / "parts"))
    assert comparison.first is None, compare_dumps.verdict(comparison)
    exact = {
        (difference.key.name, difference.key.tensor_type, difference.key.index)
        for difference in comparison.differences
        if difference.is_from_tensors
    }
    if script is pretrain_t5:
        assert {record.name for record in read_dump(tmp_path / "parts").records if record.is_share} >= {
            f"decoder.layers.{layer_idx}" for layer_idx in (0, 1)
        }
        assert exact >= {("decoder.layers.0", "grad_output", 1), ("decoder.layers.1", "grad_input", 1)}
    else:
        assert ("next_sentence", "grad_input", 0) in exact


def test_selected_tensors_are_written_and_read_back(tmp_path: Path) -> None:
    extra = "--fp64 --debug-dump-tensors --debug-dump-steps 2 --debug-dump-modules ^layers.0.(mlp|input)"
    dumps.train_with_dumps(tmp_path / "some", gas=2, extra=extra)
    dump = read_dump(tmp_path / "some")
    assert {record.step for record in dump.records} == {2}
    assert {record.name.split(".")[2] for record in dump.records} == {"mlp", "input_norm"}
    for record in dump.records:
        assert dump.tensor(record).norm().item() == pytest.approx(record.statistics.norm, rel=1e-12)
    self_comparison = compare(dump, dump)
    assert self_comparison.first is None and all(
        difference.is_from_tensors and difference.error == 0.0 for difference in self_comparison.differences
    )
    up_records = [record for record in dump.records if (record.what, record.name) == ("output", "layers.0.mlp.up")]
    swapped_files = {up_records[0].file: up_records[1].file, up_records[1].file: up_records[0].file}
    records = [dataclasses.replace(record, file=swapped_files.get(record.file, record.file)) for record in dump.records]
    swapped_comparison = compare(dump, dump._replace(records=records))
    assert {difference.key.name for difference in swapped_comparison.differences if difference.is_beyond_tolerance} == {
        "layers.0.mlp.up"
    }


def test_repeated_step_replaces_first_and_truncated_line_is_skipped(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    for steps in ((1, 2, 3), (2,)):
        writer = DumpWriter(tmp_path, 0)
        for step in steps:
            writer.begin(step)
            writer.add(torch.tensor([[float(len(steps))]]), "a", "output")
            writer.note("end", loss=1.0)
        writer.close()
    with open(tmp_path / "rank-00000.jsonl", "ab") as file:
        file.write(b'{"kind":"tensor","step":2,"rec')
    dump = read_dump(tmp_path)
    assert [(record.step, record.statistics.norm) for record in dump.records] == [(1, 3.0), (2, 1.0)]


def test_written_line_is_readable_immediately(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    writer = DumpWriter(tmp_path, 0)
    writer.begin(1)
    writer.add(torch.ones(2, 2), "a", "output")
    assert len(read_dump(tmp_path).records) == 1
    writer.close()


def test_dump_of_other_layout_and_non_dump_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_manifest(tmp_path / "a", MANIFEST)
    write_manifest(tmp_path / "a", MANIFEST)
    with pytest.raises(ValueError, match="contains the dump of another run .*micro_batch_size 1, now 2"):
        write_manifest(tmp_path / "a", MANIFEST | {"micro_batch_size": 2})
    invalid_arguments = {
        (tmp_path / "none", tmp_path / "a"): "must be a folder written by --debug-dump",
        (tmp_path / "a", tmp_path / "a"): "must contain the files of all 1 ranks",
        (tmp_path / "a", tmp_path / "a", "--rtol", "-1"): "invalid tolerance value: '-1'",
        (tmp_path / "a", tmp_path / "a", "--picture", "x.pdf"): "must end in .png",
        (tmp_path / "a", tmp_path / "a", "--json", "--all"): "Remove one of them",
        (tmp_path / "a", tmp_path / "a", "--json", "--picture", "x.png"): "Remove one of them",
    }
    for arguments, message in invalid_arguments.items():
        assert run_compare_tool(monkeypatch, *arguments) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "a" / "rank-00000.jsonl").touch()
    assert run_compare_tool(monkeypatch, tmp_path / "a", tmp_path / "a") == 2
    assert "have no common tensor in the same step" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1), (4, 1, 1)], ids=str)
def test_four_rank_layouts_agree_with_single_process(
    single_process_dump: Path, tmp_path: Path, layout: tuple[int, int, int]
) -> None:
    extra = "--fp64 --num-layers 4" if layout[1] == 4 else "--fp64"
    if layout[1] == 4:
        dumps.train_with_dumps(tmp_path / "four", gas=2, extra=extra)
    dumps.train_with_dumps(tmp_path / "other", layout, gas=4, extra=extra)
    assert_dumps_agree(tmp_path / "four" if layout[1] == 4 else single_process_dump, tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev"])
def test_v_schedules_agree_with_single_process(tmp_path: Path, schedule: str) -> None:
    dumps.train_with_dumps(tmp_path / "one", gas=2, extra="--fp64 --num-layers 4")
    extra = f"--fp64 --num-layers 4 --pipeline-schedule {schedule}"
    dumps.train_with_dumps(tmp_path / "two", (1, 2, 1), gas=4, extra=extra)
    assert_dumps_agree(tmp_path / "one", tmp_path / "two")
    dump = read_dump(tmp_path / "two")
    stage_0_outputs = {
        (record.name, record.chunk) for record in dump.records if record.rank == 0 and record.what == "output"
    }
    assert {("embedding.word", 0), ("layers.0", 0), ("layers.3", 1), ("final_norm", 1)} <= stage_0_outputs


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "--pipeline-chunks 2 --num-layers 2", "--pipeline-schedule zb-v --num-layers 2"])
def test_t5_agrees_across_stages_and_chunks(tmp_path: Path, extra: str) -> None:
    dumps.train_with_dumps(tmp_path / "one", gas=2, script=pretrain_t5)
    dumps.train_with_dumps(tmp_path / "two", (1, 2, 1), gas=4, extra=f"--fp64 {extra}", script=pretrain_t5)
    assert_dumps_agree(tmp_path / "one", tmp_path / "two")
    calls = {key.call for key in group_records(read_dump(tmp_path / "two")) if key.name == "embedding.word"}
    assert calls == {0, 1}


@pytest.mark.slow
def test_number_formats_and_zero_stages_agree_within_tolerance(single_process_dump: Path, tmp_path: Path) -> None:
    for name, layout, extra in (
        ("fp32", (2, 1, 1), "--fp32"),
        ("bf16", (1, 1, 2), "--bf16 --zero-stage 1"),
        ("zero-2", (1, 1, 2), "--fp64 --zero-stage 2"),
        ("zero-3", (1, 1, 2), "--fp64 --zero-stage 3"),
        ("zero-3-stages", (1, 2, 2), "--fp64 --zero-stage 3"),
        ("gpipe", (1, 2, 1), "--fp64 --pipeline-schedule gpipe"),
    ):
        dumps.train_with_dumps(tmp_path / name, layout, gas=4, extra=extra)
        assert_dumps_agree(single_process_dump, tmp_path / name)
    with pytest.raises(AssertionError, match="first difference"):
        assert_dumps_agree(single_process_dump, tmp_path / "bf16", rtol=1e-4)

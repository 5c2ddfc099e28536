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
from megatron.debug.compare import compare, grouped, paired
from megatron.debug.dump_files import Samples, Writer, read, write_manifest
from megatron.debug.statistics import Cut
from megatron.models.common.parameters import named_modules
from tests.helpers import dumps
from tools import compare_dumps

RECOMPUTED = "--fp64 --pipeline-schedule zb-h1 --checkpoint-activations"
FACTS = {"layout": {}, "family": "gpt2", "micro_batch_size": 1, "world_size": 1, "ranks": [], "dtype": "fp32"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of one process, of two steps."""
    folder = tmp_path_factory.mktemp("one")
    dumps.run(folder, gas=2, extra="--fp64 --debug-dump-steps 1-3")
    return folder


def scaled(model: torch.nn.Module) -> None:
    """Let one layer of the model give a thousandth more than it should."""
    for name, module in named_modules(model):
        if name == "layers.1.attention.dense":
            plain = module.forward
            module.forward = lambda x, plain=plain: 1.001 * plain(x)  # type: ignore[method-assign]


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Return the exit code of the tool."""
    monkeypatch.setattr(sys, "argv", ["compare_dumps.py", *map(str, words)])
    try:
        return compare_dumps.main()
    except SystemExit as error:
        return int(error.code or 0)


def assert_agree(first: Path, second: Path, rtol: float | None = None) -> None:
    """Check that the dumps agree in all tensors of the first but those that only single-stage models have."""
    one, other = read(first), read(second)
    found = compare(one, other, rtol)
    assert found.first is None, compare_dumps.verdict(found)
    assert {key.name for key in found.only_first} <= {"encoder", "decoder"}
    kinds = Counter(key.what for key in grouped(one))
    assert min(kinds[what] for what in ("weight", "input", "output", "grad_output", "grad_input", "gradient")) > 20
    assert not any(each.copies for each in found.differences)


@pytest.mark.slow  # dumps beside the steps change no bit: tests/training/test_side_effects.py
def test_a_dump_changes_no_bit_and_holds_each_tensor_of_a_recomputed_split_backward_once(
    one: Path, tmp_path: Path
) -> None:
    traces = dumps.run(tmp_path / "two", (1, 2, 1), gas=4, extra=RECOMPUTED)
    plain = dumps.run(None, (1, 2, 1), gas=4, extra=RECOMPUTED)
    for seen, trace in zip(traces, plain, strict=True):
        assert (seen.losses, seen.grad_norms) == (trace.losses, trace.grad_norms)
        assert all(torch.equal(seen.weights[name][1], tensor) for name, (_, tensor) in trace.weights.items())
    two = read(tmp_path / "two")
    places = Counter((r.rank, r.step, r.what, r.name, r.call, r.index, r.micro_batch) for r in two.records)
    assert set(places.values()) == {1}
    micro_batches = {(r.micro_batch, r.samples) for r in two.records if r.samples is not None}
    assert micro_batches == {(i, Samples(2 * i, 2 * i + 2)) for i in range(4)}
    assert [two.ends[step]["loss"] for step in (1, 2)] == traces[0].losses
    assert_agree(one, tmp_path / "two")


def test_a_layer_that_is_off_by_a_thousandth_on_two_tensor_ranks_is_named(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dumps.run(tmp_path / "wrong", (2, 1, 1), gas=4, plant=scaled, steps=1)
    assert call(monkeypatch, one, tmp_path / "wrong", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    first = report["first_difference"]
    assert (first["name"], first["what"], first["phase"]) == ("layers.1.attention.dense", "output", "forward")
    assert 5e-4 < first["error"] < 2e-3 and not report["equal"]
    beyond = {row["name"] for row in report["tensors"] if row["differs"] and row["phase"] == "forward"}
    assert beyond == {
        "layers.1.attention.dense", "layers.1.attention", "layers.1.post_attention_norm", "layers.1.mlp.up",
        "layers.1.mlp.down", "layers.1.mlp", "layers.1", "final_norm",
    }  # fmt: skip
    assert call(monkeypatch, one, tmp_path / "wrong", "--json", "--rtol", "0.1") == 0
    capsys.readouterr()
    assert call(monkeypatch, one, tmp_path / "wrong") == 1
    assert (tmp_path / "wrong" / "compare.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "verdict: first difference: output of layers.1.attention.dense in step 1, forward" in out
    assert "tensor 2, pipe 1, data 1" in out


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
def test_other_families_agree_in_slices_and_stages(tmp_path: Path, script: ModuleType) -> None:
    layouts = {"one": (1, 1, 1), "slices": (2, 1, 1), "stages": (1, 2, 1)}
    for name, layout in layouts.items():
        dumps.run(tmp_path / name, layout, gas=2, script=script)
        assert_agree(tmp_path / "one", tmp_path / name)
    if script is not pretrain_bert:
        found = [r for r in read(tmp_path / "slices").records if (r.name, r.what) == ("layers.1.mlp.up", "output")]
        half = found[0].shape[-1]
        assert {(r.index, r.cut) for r in found} == {
            (index, Cut(2, start, half, 2 * half)) for index in (0, 1) for start in (0, half)
        }
        pairs = paired(read(tmp_path / "one"), read(tmp_path / "stages"))
        assert {one.key.index for one, _ in pairs if one.key.name == "layers.1.mlp.up"} == {0, 1}


@pytest.mark.slow
def test_parts_of_the_sequence_are_told_and_agree_with_one_process(one: Path, tmp_path: Path) -> None:
    """Rows add up as columns do, so that the sketches of parts see what those of the whole see."""
    dumps.run(tmp_path / "parts", (2, 1, 1), gas=4, extra="--fp64 --sequence-parallel")
    assert_agree(one, tmp_path / "parts")
    for name in ("embedding", "layers.0.input_norm", "layers.0.attention.dense", "layers.0", "final_norm"):
        found = [r for r in read(tmp_path / "parts").records if (r.name, r.what) == (name, "output")]
        assert {r.cut for r in found} == {Cut(0, 0, 4, 8), Cut(0, 4, 4, 8)}, name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("script", [pretrain_llama, pretrain_mpt, pretrain_bert, pretrain_t5], ids=lambda s: s.__name__)
def test_parts_of_the_sequence_of_other_families_agree(
    tmp_path: Path, script: ModuleType, layout: tuple[int, int, int]
) -> None:
    dumps.run(tmp_path / "one", gas=2, script=script)
    dumps.run(tmp_path / "parts", layout, gas=4, extra="--fp64 --sequence-parallel", script=script)
    assert_agree(tmp_path / "one", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("script", [pretrain_bert, pretrain_t5], ids=lambda s: s.__name__)
def test_shares_and_rows_without_a_gradient_make_the_whole_tensors(tmp_path: Path, script: ModuleType) -> None:
    """The layers of T5's decoder, all on the second stage, hand on memory, whose gradient between them is a share."""
    tensors = "--fp64 --debug-dump-tensors --debug-dump-steps 1 --debug-dump-modules ^(decoder|next) "
    tensors += "--partition-method type:layer"
    dumps.run(tmp_path / "one", (1, 2, 1), gas=4, steps=1, extra=tensors, script=script)
    dumps.run(tmp_path / "parts", (2, 2, 1), gas=4, steps=1, extra=f"{tensors} --sequence-parallel", script=script)
    found = compare(read(tmp_path / "one"), read(tmp_path / "parts"))
    assert found.first is None, compare_dumps.verdict(found)
    exact = {(each.key.name, each.key.what, each.key.index) for each in found.differences if each.by_tensors}
    if script is pretrain_t5:
        assert {r.name for r in read(tmp_path / "parts").records if r.is_share} >= {
            f"decoder.layers.{i}" for i in (0, 1)
        }
        assert exact >= {("decoder.layers.0", "grad_output", 1), ("decoder.layers.1", "grad_input", 1)}
    else:
        assert ("next_sentence", "grad_input", 0) in exact


def test_what_is_asked_for_alone_is_written_and_read_back(tmp_path: Path) -> None:
    chosen = "--fp64 --debug-dump-tensors --debug-dump-steps 2 --debug-dump-modules ^layers.0.(mlp|input)"
    dumps.run(tmp_path / "some", gas=2, extra=chosen)
    dump = read(tmp_path / "some")
    assert {r.step for r in dump.records} == {2}
    assert {r.name.split(".")[2] for r in dump.records} == {"mlp", "input_norm"}
    for record in dump.records:
        assert dump.tensor(record).norm().item() == pytest.approx(record.statistics.norm, rel=1e-12)
    same = compare(dump, dump)
    assert same.first is None and all(each.by_tensors and each.error == 0.0 for each in same.differences)
    up = [r for r in dump.records if (r.what, r.name) == ("output", "layers.0.mlp.up")]
    swapped = {up[0].file: up[1].file, up[1].file: up[0].file}
    records = [dataclasses.replace(r, file=swapped.get(r.file, r.file)) for r in dump.records]
    other = compare(dump, dump._replace(records=records))
    assert {each.key.name for each in other.differences if each.is_beyond} == {"layers.0.mlp.up"}


def test_a_step_that_comes_again_replaces_the_first_and_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    write_manifest(tmp_path, FACTS)
    for steps in ((1, 2, 3), (2,)):
        writer = Writer(tmp_path, 0)
        for step in steps:
            writer.begin(step)
            writer.add(torch.tensor([[float(len(steps))]]), "a", "output")
            writer.note("end", loss=1.0)
        writer.close()
    with open(tmp_path / "rank-00000.jsonl", "ab") as file:
        file.write(b'{"kind":"tensor","step":2,"rec')
    dump = read(tmp_path)
    assert [(r.step, r.statistics.norm) for r in dump.records] == [(1, 3.0), (2, 1.0)]


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, FACTS)
    writer = Writer(tmp_path, 0)
    writer.begin(1)
    writer.add(torch.ones(2, 2), "a", "output")
    assert len(read(tmp_path).records) == 1
    writer.close()


def test_a_folder_of_another_layout_and_what_is_no_dump_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_manifest(tmp_path / "a", FACTS)
    write_manifest(tmp_path / "a", FACTS)
    with pytest.raises(ValueError, match="contains the dump of another run .*micro_batch_size 1, now 2"):
        write_manifest(tmp_path / "a", FACTS | {"micro_batch_size": 2})
    wrong = {
        (tmp_path / "none", tmp_path / "a"): "must be a folder written by --debug-dump",
        (tmp_path / "a", tmp_path / "a"): "must contain the files of all 1 ranks",
        (tmp_path / "a", tmp_path / "a", "--rtol", "-1"): "invalid tolerance value: '-1'",
        (tmp_path / "a", tmp_path / "a", "--picture", "x.pdf"): "must end in .png",
        (tmp_path / "a", tmp_path / "a", "--json", "--all"): "Remove one of them",
        (tmp_path / "a", tmp_path / "a", "--json", "--picture", "x.png"): "Remove one of them",
    }
    for words, message in wrong.items():
        assert call(monkeypatch, *words) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "a" / "rank-00000.jsonl").touch()
    assert call(monkeypatch, tmp_path / "a", tmp_path / "a") == 2
    assert "have no tensor of the same step in common" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1), (4, 1, 1)], ids=str)
def test_layouts_of_four_ranks_agree_with_one_process(one: Path, tmp_path: Path, layout: tuple[int, int, int]) -> None:
    extra = "--fp64 --num-layers 4" if layout[1] == 4 else "--fp64"
    if layout[1] == 4:
        dumps.run(tmp_path / "four", gas=2, extra=extra)
    dumps.run(tmp_path / "other", layout, gas=4, extra=extra)
    assert_agree(tmp_path / "four" if layout[1] == 4 else one, tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev"])
def test_a_v_agrees_with_one_process(tmp_path: Path, schedule: str) -> None:
    dumps.run(tmp_path / "one", gas=2, extra="--fp64 --num-layers 4")
    extra = f"--fp64 --num-layers 4 --pipeline-schedule {schedule}"
    dumps.run(tmp_path / "two", (1, 2, 1), gas=4, extra=extra)
    assert_agree(tmp_path / "one", tmp_path / "two")
    found = read(tmp_path / "two")
    of_stage_0 = {(r.name, r.chunk) for r in found.records if r.rank == 0 and r.what == "output"}
    assert {("embedding.word", 0), ("layers.0", 0), ("layers.3", 1), ("final_norm", 1)} <= of_stage_0


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "--pipeline-chunks 2 --num-layers 2", "--pipeline-schedule zb-v --num-layers 2"])
def test_t5_agrees_through_stages_and_chunks(tmp_path: Path, extra: str) -> None:
    dumps.run(tmp_path / "one", gas=2, script=pretrain_t5)
    dumps.run(tmp_path / "two", (1, 2, 1), gas=4, extra=f"--fp64 {extra}", script=pretrain_t5)
    assert_agree(tmp_path / "one", tmp_path / "two")
    calls = {key.call for key in grouped(read(tmp_path / "two")) if key.name == "embedding.word"}
    assert calls == {0, 1}


@pytest.mark.slow
def test_number_formats_and_zero_agree_within_their_tolerance(one: Path, tmp_path: Path) -> None:
    for name, layout, extra in (
        ("fp32", (2, 1, 1), "--fp32"),
        ("bf16", (1, 1, 2), "--bf16 --zero-stage 1"),
        ("zero-2", (1, 1, 2), "--fp64 --zero-stage 2"),
        ("zero-3", (1, 1, 2), "--fp64 --zero-stage 3"),
        ("gpipe", (1, 2, 1), "--fp64 --pipeline-schedule gpipe"),
    ):
        dumps.run(tmp_path / name, layout, gas=4, extra=extra)
        assert_agree(one, tmp_path / name)
    with pytest.raises(AssertionError, match="first difference"):
        assert_agree(one, tmp_path / "bf16", rtol=1e-4)

"""Part speed: what is run where, and that its figures are ratios of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import step_time
from benchmarks.contenders import GPTSizes, LlamaSizes, T5Sizes
from benchmarks.gpu import speed
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.part import PASSED, Done, Machine, Results, Skip, Verdict
from benchmarks.gpu.speed import COMPILED, HF, MODELS, OURS, Fitted, Model, config_for, estimated, fitted
from benchmarks.step_profile import kernels_of, look
from benchmarks.step_time import PRODUCT, Record, Work
from megatron.log import human_bytes
from megatron.models import registry
from megatron.mpu.topology import Topology
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import device
from megatron.training.dry_run import plan_rows

GIB = 2**30
SIZES = GPTSizes(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=1024, seq_length=128)
RUN = Fitted(SIZES, 4, (OURS, "hf"), 0)
MODEL = Model(name="toy", title="Toy", slices=(SIZES,), contenders=RUN.contenders, batches=(4, 2))
GPU, HOST = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


def machine(tmp_path: Path, gigabytes: float = 139.0, **others: Any) -> Machine:
    facts = {"kind": "cuda", "name": "NVIDIA H200", "is_dry": False, "num_devices": 1, "num_cores": 16}
    return Machine(**facts | {"memory_bytes": int(gigabytes * GIB), "work": tmp_path, "out": tmp_path} | others)


def told(**changes: Any) -> dict[str, Any]:
    """Return what step_time.py says of a run whose step took 100 ms and 2 GiB, 3 of them reserved."""
    row = {
        "ms_per_step": 100.0, "ms_quartiles": [99.0, 100.0, 102.0], "tokens_per_s": 5120.0, "mfu": 0.5,
        "mfu_whole": 0.6, "mfu_sheet": 0.4, "peak_memory_bytes": 2 * GIB, "reserved_memory_bytes": 3 * GIB,
        "compile_s": 0.0, "losses": [7.0, 6.9], "looked": {}, **changes,
    }  # fmt: skip
    other = row | {"speed_of_ours": {OURS: (1.1, 1.2, 1.3)}}
    return {"peak_flops_per_s": 7e14, "sheet_flops_per_s": 9.89e14, "contenders": {OURS: row, "hf": other}}


def test_the_kernels_are_what_ran_on_the_device_and_their_shares_those_of_all_kernels() -> None:
    def event(key: str, us: float, count: int = 1, place: Any = GPU, note: bool = False) -> Any:
        return SimpleNamespace(
            key=key, self_device_time_total=us, self_cpu_time_total=us, count=count, device_type=place,
            is_user_annotation=note,
        )  # fmt: skip

    others = [event(f"other {number}", 1.0) for number in range(12)]
    events = [
        event("aten::mm", 5000.0, place=HOST), event("step", 9000.0, note=True), event("gemm", 3000.0, 7),
        event("flash_fwd_kernel", 988.0, 2), *others,
    ]  # fmt: skip
    found = kernels_of(events, "cuda")
    assert found["kernels"][0] == {"name": "gemm", "ms": 3.0, "share": 0.75, "count": 7}
    assert found["kernels_ms"] == pytest.approx(4.0) and len(found["kernels"]) == 10
    assert found["attention_kernels"] == ["flash_fwd_kernel"]
    assert [each["name"] for each in kernels_of(events, "cpu")["kernels"]] == ["aten::mm"]


def test_a_look_says_what_torch_chose_for_each_shape_of_attention() -> None:
    query, mask = torch.randn(1, 2, 8, 4), torch.zeros(8, 8)
    outputs: list[torch.Tensor] = []

    def step() -> None:
        outputs.append(F.scaled_dot_product_attention(query, query, query, is_causal=True))
        for _ in range(2):
            outputs.append(F.scaled_dot_product_attention(query, query, query, attn_mask=mask))

    found = look(step, "cpu")["attention"]
    assert [(each["query"], each["has_mask"], each["calls"]) for each in found] == [
        ([1, 2, 8, 4], False, 1),
        ([1, 2, 8, 4], True, 2),
    ]
    assert {each["kernel"] for each in found} <= {"FLASH_ATTENTION", "MATH"}
    seen, outputs = outputs, []
    step()
    assert all(torch.equal(a, b) for a, b in zip(seen, outputs, strict=True))


def test_reserved_memory_is_the_most_that_the_allocator_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda: 7)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: 6)
    assert (step_time._reserved_bytes("cuda"), step_time._reserved_bytes("cpu")) == (7, 0)


def test_a_step_has_quartiles_and_both_kinds_of_memory() -> None:
    work = Work(sizes=SIZES, batch_size=4, steps=2, kind="cuda", dtype="bf16", threads=1)
    side, number = step_time.products_of("cuda")
    record = Record(
        turns_s=[0.2, 0.4, 0.3, 0.5, 0.1], cpu_s=[1.0] * 5, losses=[1.0], peak_bytes=5, reserved_bytes=7,
        looked={"kernels": []},
    )  # fmt: skip
    product = Record(turns_s=[2.0 * side**3 * number / 1e12] * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_time.device, "name", lambda kind: "NVIDIA H200")
        result = step_time.summarize({OURS: record, PRODUCT: product}, work)
    row = result["contenders"][OURS]
    assert row["ms_quartiles"] == pytest.approx([100.0, 150.0, 200.0])
    assert (row["peak_memory_bytes"], row["reserved_memory_bytes"], row["looked"]) == (5, 7, {"kernels": []})
    flops = registry.costs_of(config_for(SIZES, 4, "cuda")).flops_per_step(4)
    assert row["mfu"] == pytest.approx(flops / 0.15 / 1e12)
    assert row["mfu_sheet"] == pytest.approx(flops / 0.15 / 989e12)


def test_ratios_are_estimates_over_measurement(tmp_path: Path) -> None:
    config = config_for(SIZES, 4, "cuda")
    planned = 1e3 * Planner(config, device("h200")).estimate(layout_of(config, 1)).step_s
    memory = estimated(SIZES, 4, "cuda").total
    given = told(ms_per_step=2 * planned, peak_memory_bytes=4 * memory, reserved_memory_bytes=5 * memory)
    figures = speed.figures_of(MODEL, RUN, given, machine(tmp_path))
    ours = figures["contenders"][OURS]
    assert ours["planner_ratio"] == pytest.approx(0.5) and ours["memory_ratio"] == pytest.approx(0.25)
    assert (ours["allocated_bytes"], ours["reserved_bytes"]) == (4 * memory, 5 * memory)
    assert figures["contenders"]["hf"]["speed_of_ours"] == {OURS: 1.2}
    assert "planner_ratio" not in figures["contenders"]["hf"]
    assert figures["parameters"] == registry.costs_of(config).num_parameters
    line = speed.line_of(figures)
    assert "planner estimated / measured 0.500" in line and "memory estimated / measured 0.250" in line
    unknown = speed.figures_of(MODEL, RUN, given, machine(tmp_path, name="NVIDIA New 1"))
    assert unknown["contenders"][OURS]["planner_ratio"] is None
    assert json.loads(json.dumps(figures)) == figures


def test_times_count_where_the_profiler_does_not_work(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    given = told(looked=step_time._looked(broken))
    figures = speed.figures_of(MODEL, RUN, given, machine(tmp_path, name="NVIDIA New 1"))
    assert figures["kernels"] == [] and figures["contenders"][OURS]["ms"] == 100.0
    assert speed.line_of(figures).endswith("no profile: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")


def test_the_estimate_is_what_a_dry_run_says() -> None:
    for contender in (OURS, COMPILED):
        config = config_for(SIZES, 4, "cuda", contender)
        rows = dict(
            plan_rows(config, Topology(pipe=1, data=1, tensor=1), registry.costs_of(config).stage_bounds(1), "bf16")
        )
        assert f"about {human_bytes(estimated(SIZES, 4, 'cuda', contender).total)} on each rank" in rows["stage 0"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mfu": 1.2}, "MFU of ours must be between 0 and 1"),
        ({"losses": [float("nan")]}, "must be finite"),
        ({"reserved_memory_bytes": GIB}, "must reserve at least"),
        ({"peak_memory_bytes": 0}, "must reserve at least"),
    ],
)
def test_figures_that_cannot_be_fail_the_case(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    place = machine(tmp_path, name="NVIDIA New 1")
    speed.check(speed.figures_of(MODEL, RUN, told(), place), "cuda")
    if not changes.get("peak_memory_bytes", 1):
        figures = speed.figures_of(MODEL, RUN, told(), place)
        figures["contenders"][OURS]["allocated_bytes"] = 0
    else:
        figures = speed.figures_of(MODEL, RUN, told(**changes), place)
    with pytest.raises(AssertionError, match=message):
        speed.check(figures, "cuda")


def test_a_smaller_device_gets_smaller_batches_then_fewer_contenders_then_a_smaller_slice() -> None:
    by_name = {model.name: model for model in MODELS}
    large, slices = by_name["gpt2 1.3b s2048"], by_name["llama 7b slice s2048"]
    found = [fitted(large, gigabytes * GIB) for gigabytes in (139, 80, 40, 16)]
    assert [one and (one.batch_size, len(one.contenders)) for one in found] == [(8, 2), (2, 2), (2, 1), None]
    cut = [fitted(slices, gigabytes * GIB) for gigabytes in (139, 24, 16)]
    assert [one and (one.sizes.num_layers, one.contenders[-1]) for one in cut] == [(5, "hf"), (2, OURS), None]
    assert fitted(large, 139 * GIB, below=8).batch_size == 4  # type: ignore[union-attr]
    assert fitted(large, 139 * GIB, below=1) is None
    small = {model.name for model in MODELS if fitted(model, int(15.8 * GIB))}
    assert {"t5-base s1024", "gpt2 125m s1024", "gpt2 350m s1024", "gpt2 350m s2048"} <= small


def test_what_has_no_room_is_skipped_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(Skip, match=r"needs about \d\d\.\d GiB for 1 sequence of 2048 tokens, the device has 15\.8 GiB"):
        speed.room_for(MODELS[0], machine(tmp_path, 15.8))


def test_a_run_without_room_after_all_is_tried_with_fewer_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def python(place: Machine, *words: str) -> Done:
        asked.append(list(words))
        if len(asked) == 1:
            return Done(1, "torch.OutOfMemoryError: CUDA out of memory. Tried", 1.0)
        (tmp_path / "step_time.json").write_text(json.dumps(told()))
        return Done(0, "", 1.0)

    monkeypatch.setattr(speed, "python", python)
    monkeypatch.setattr(speed, "require_bf16", lambda: None)
    _, figures = speed.measure(MODEL, machine(tmp_path), tmp_path)
    assert [words[words.index("--batch-size") + 1] for words in asked] == ["4", "2"]
    assert figures["batch_size"] == 2
    monkeypatch.setattr(speed, "python", lambda place, *words: Done(1, "error: no such device", 1.0))
    with pytest.raises(AssertionError, match="no such device"):
        speed.measure(MODEL, machine(tmp_path), tmp_path)


def test_every_case_is_a_command_of_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(speed, "python", lambda place, *words: asked.append(list(words[1:])))
    for model in MODELS:
        run = Fitted(model.slices[0], model.batches[0], model.contenders, 0)
        speed.timed(model, run, machine(tmp_path, kind="cpu"), tmp_path)
        args = step_time.parse_args(asked[-1])
        assert step_time.work_of(args).sizes == run.sizes
        assert (args.contenders, args.batch_size) == (list(run.contenders), run.batch_size)
        assert args.look == (model.name in ("gpt2 1.3b s2048", "t5-base s1024"))
    names = [case.name for case in speed.cases(machine(tmp_path))]
    assert names.index("planner") == speed.PLANNED_AFTER and len(set(names)) == len(MODELS) + 1


def test_the_models_are_those_of_their_names() -> None:
    found = {model.title: registry.costs_of(config_for(model.slices[0], 1, "cuda")).num_parameters for model in MODELS}
    expected = {"GPT-2 125M": 125e6, "GPT-2 350M": 355e6, "GPT-2 1.3B": 1.3e9, "T5-base": 223e6}
    assert {title: found[title] for title in expected} == pytest.approx(expected, rel=0.03)
    layers = 6.74e9 - 2 * 32000 * 4096  # of LLaMA 7B
    assert found["LLaMA 7B, a slice"] == pytest.approx(layers * 5 / 32 + 2 * 32000 * 4096, rel=0.01)


def test_every_model_is_timed_at_both_lengths_eager_and_compiled_and_beside_others() -> None:
    for title in {model.title for model in MODELS}:
        models = [model for model in MODELS if model.title == title]
        assert {model.name.rpartition(" s")[2] for model in models} == {"1024", "2048"}, title
        assert {OURS, COMPILED, HF} <= {name for model in models for name in model.contenders}, title


@pytest.mark.parametrize(
    "name, gigabytes, sheet",
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80g"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80g"),
        ("NVIDIA H20", 95.6, "h20"),
        ("Tesla T4", 14.7, None),
    ],
)
def test_the_data_sheet_of_a_gpu_goes_by_name_and_memory(name: str, gigabytes: float, sheet: str | None) -> None:
    assert speed.sheet_of(name, int(gigabytes * GIB)) == sheet


def test_the_planner_is_compared_with_the_cases_that_were_measured(tmp_path: Path) -> None:
    place = machine(tmp_path, name="NVIDIA New 1")
    about = {"device": "x", "kind": "cuda", "commit": "c", "is_dry": False, "date": "2026-12-01"}
    place.results = Results(tmp_path / "results.json", about)
    figures = speed.figures_of(MODEL, RUN, told(), place)
    place.results.add("speed", "measured", Verdict(PASSED, "", json.loads(json.dumps(figures))))
    place.results.add("speed", "broken", Verdict("failed", ""))
    planned = device("h200")
    found = dict(speed.planned_of(place, planned))
    assert set(found) == {"measured"} and set(found["measured"]) == {OURS}
    ms = speed.planner_ms(SIZES, 4, planned, "cuda")
    assert found["measured"][OURS] == {"planner_ms": ms, "ms": 100.0, "planner_ratio": pytest.approx(ms / 100.0)}


def test_sizes_come_back_from_their_figures() -> None:
    for sizes in (SIZES, T5Sizes(num_layers=3), LlamaSizes(ff_hidden_size=96)):
        assert speed.FAMILIES[sizes.family](**json.loads(json.dumps(vars(sizes)))) == sizes


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_dry_form_runs(tmp_path: Path) -> None:
    """On a busy machine the part's time is over before its last case; a second start goes on there."""
    for _ in range(3):
        assert main(["--device", "cpu", "--out", str(tmp_path), "speed", "tables"]) == 0
    (path,) = tmp_path.glob("*.json")
    cases = json.loads(path.read_text())["parts"]["speed"]["cases"]
    assert {case["status"] for case in cases.values()} == {"passed"}
    assert len(cases["gpt2 1.3b s2048"]["figures"]["kernels"]) == 10
    assert set(cases["planner"]["figures"]["planned"]) == {"gpt2 1.3b s2048", "t5-base s1024"}
    assert {each.name for each in tmp_path.iterdir()} == {path.name, f"{path.stem}.md"}

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
from benchmarks.gpu.part import PASSED, TIMED_OUT, CompletedCommand, Machine, Results, Skip, Verdict
from benchmarks.gpu.speed import (
    COMPILED,
    HF,
    MODELS,
    OURS,
    FittedRun,
    Model,
    estimate_memory,
    fit_model,
    make_run_config,
)
from benchmarks.step_profile import kernels_of, profile_step
from benchmarks.step_time import PRODUCT, Record, Work
from megatron.log import human_bytes
from megatron.models import registry
from megatron.mpu.topology import Topology
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import gpu_machine
from megatron.training.dry_run import plan_rows

GIB = 2**30
SIZES = GPTSizes(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=1024, seq_length=128)
RUN = FittedRun(SIZES, 4, (OURS, "hf"), 0)
MODEL = Model(name="toy", title="Toy", slices=(SIZES,), contenders=RUN.contenders, batches=(4, 2))
GPU, HOST = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


def make_machine(tmp_path: Path, gigabytes: float = 139.0, **overrides: Any) -> Machine:
    fields = {"device_type": "cuda", "name": "NVIDIA H200", "is_dry": False, "num_devices": 1, "num_cores": 16}
    return Machine(**fields | {"memory_bytes": int(gigabytes * GIB), "work": tmp_path, "out": tmp_path} | overrides)


def make_step_time_result(**overrides: Any) -> dict[str, Any]:
    """Return what step_time.py says of a run whose step took 100 ms and 2 GiB, 3 of them reserved."""
    row = {
        "ms_per_step": 100.0, "ms_quartiles": [99.0, 100.0, 102.0], "tokens_per_s": 5120.0, "mfu": 0.5,
        "mfu_whole": 0.6, "mfu_sheet": 0.4, "peak_memory_bytes": 2 * GIB, "reserved_memory_bytes": 3 * GIB,
        "compile_s": 0.0, "losses": [7.0, 6.9], "looked": {}, **overrides,
    }  # fmt: skip
    reference_row = row | {"speed_of_ours": {OURS: (1.1, 1.2, 1.3)}}
    return {
        "peak_flops_per_s": 7e14,
        "sheet_flops_per_s": 9.89e14,
        "contenders": {OURS: row, "hf": reference_row},
        "errors": {},
    }


def test_kernel_shares_are_of_total_device_time() -> None:
    def make_event(key: str, us: float, count: int = 1, device_machine: Any = GPU, is_annotation: bool = False) -> Any:
        return SimpleNamespace(
            key=key, self_device_time_total=us, self_cpu_time_total=us, count=count, device_type=device_machine,
            is_user_annotation=is_annotation,
        )  # fmt: skip

    other_events = [make_event(f"other {idx}", 1.0) for idx in range(12)]
    events = [
        make_event("aten::mm", 5000.0, device_machine=HOST), make_event("step", 9000.0, is_annotation=True),
        make_event("gemm", 3000.0, 7),
        make_event("flash_fwd_kernel", 988.0, 2), *other_events,
    ]  # fmt: skip
    profile = kernels_of(events, "cuda")
    assert profile["kernels"][0] == {"name": "gemm", "ms": 3.0, "share": 0.75, "count": 7}
    assert profile["kernels_ms"] == pytest.approx(4.0) and len(profile["kernels"]) == 10
    assert profile["attention_kernels"] == ["flash_fwd_kernel"]
    assert [kernel["name"] for kernel in kernels_of(events, "cpu")["kernels"]] == ["aten::mm"]


def test_profile_reports_attention_kernel_of_each_shape() -> None:
    query, mask = torch.randn(1, 2, 8, 4), torch.zeros(8, 8)
    outputs: list[torch.Tensor] = []

    def step() -> None:
        outputs.append(F.scaled_dot_product_attention(query, query, query, is_causal=True))
        for _ in range(2):
            outputs.append(F.scaled_dot_product_attention(query, query, query, attn_mask=mask))

    attention_calls = profile_step(step, "cpu")["attention"]
    assert [(call["query"], call["has_mask"], call["calls"]) for call in attention_calls] == [
        ([1, 2, 8, 4], False, 1),
        ([1, 2, 8, 4], True, 2),
    ]
    assert {call["kernel"] for call in attention_calls} <= {"FLASH_ATTENTION", "MATH"}
    profiled_outputs, outputs = outputs, []
    step()
    assert all(torch.equal(a, b) for a, b in zip(profiled_outputs, outputs, strict=True))


def test_reserved_bytes_is_peak_of_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda: 7)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: 6)
    assert (step_time._reserved_bytes("cuda"), step_time._reserved_bytes("cpu")) == (7, 0)


def test_summary_has_quartiles_and_allocated_and_reserved_memory() -> None:
    work = Work(sizes=SIZES, batch_size=4, steps=2, kind="cuda", dtype="bf16", threads=1)
    side, num_products = step_time.products_of("cuda")
    record = Record(
        turns_s=[0.2, 0.4, 0.3, 0.5, 0.1], cpu_s=[1.0] * 5, losses=[1.0], peak_bytes=5, reserved_bytes=7,
        profile={"kernels": []},
    )  # fmt: skip
    product = Record(turns_s=[2.0 * side**3 * num_products / 1e12] * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_time.device, "name", lambda device_type: "NVIDIA H200")
        result = step_time.summarize({OURS: record, PRODUCT: product}, work)
    row = result["contenders"][OURS]
    assert row["ms_quartiles"] == pytest.approx([100.0, 150.0, 200.0])
    assert (row["peak_memory_bytes"], row["reserved_memory_bytes"], row["looked"]) == (5, 7, {"kernels": []})
    flops = registry.costs_of(make_run_config(SIZES, 4, "cuda")).flops_per_step(4)
    assert row["mfu"] == pytest.approx(flops / 0.15 / 1e12)
    assert row["mfu_sheet"] == pytest.approx(flops / 0.15 / 989e12)


def test_ratios_are_estimates_over_measurements(tmp_path: Path) -> None:
    config = make_run_config(SIZES, 4, "cuda")
    planned_ms = 1e3 * Planner(config, gpu_machine("h200")).estimate(layout_of(config, 1)).step_s
    memory = estimate_memory(SIZES, 4, "cuda").total
    measurement = make_step_time_result(
        ms_per_step=2 * planned_ms, peak_memory_bytes=4 * memory, reserved_memory_bytes=5 * memory
    )
    figures = speed.figures_of(MODEL, RUN, measurement, make_machine(tmp_path))
    ours = figures["contenders"][OURS]
    assert ours["planner_ratio"] == pytest.approx(0.5) and ours["memory_ratio"] == pytest.approx(0.25)
    assert (ours["allocated_bytes"], ours["reserved_bytes"]) == (4 * memory, 5 * memory)
    assert figures["contenders"]["hf"]["speed_of_ours"] == {OURS: 1.2}
    assert "planner_ratio" not in figures["contenders"]["hf"]
    assert figures["parameters"] == registry.costs_of(config).num_parameters
    line = speed.summary_line(figures)
    assert "planner estimated / measured 0.500" in line and "memory estimated / measured 0.250" in line
    unknown = speed.figures_of(MODEL, RUN, measurement, make_machine(tmp_path, name="NVIDIA New 1"))
    assert unknown["contenders"][OURS]["planner_ratio"] is None
    assert json.loads(json.dumps(figures)) == figures


def test_times_are_reported_if_profiler_fails(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    measurement = make_step_time_result(looked=step_time._profile_or_error(broken))
    figures = speed.figures_of(MODEL, RUN, measurement, make_machine(tmp_path, name="NVIDIA New 1"))
    assert figures["kernels"] == [] and figures["contenders"][OURS]["ms"] == 100.0
    assert speed.summary_line(figures).endswith("no profile: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")


def test_estimate_equals_dry_run() -> None:
    for contender in (OURS, COMPILED):
        config = make_run_config(SIZES, 4, "cuda", contender)
        rows = dict(
            plan_rows(config, Topology(pipe=1, data=1, tensor=1), registry.costs_of(config).stage_bounds(1), "bf16")
        )
        assert (
            f"about {human_bytes(estimate_memory(SIZES, 4, 'cuda', contender).total)} on each rank" in rows["stage 0"]
        )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mfu": 1.2}, "MFU of ours must be between 0 and 1"),
        ({"losses": [float("nan")]}, "must be finite"),
        ({"reserved_memory_bytes": GIB}, "must reserve at least"),
        ({"peak_memory_bytes": 0}, "must reserve at least"),
    ],
)
def test_impossible_figures_fail(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    device_machine = make_machine(tmp_path, name="NVIDIA New 1")
    speed.check(speed.figures_of(MODEL, RUN, make_step_time_result(), device_machine), "cuda")
    if not changes.get("peak_memory_bytes", 1):
        figures = speed.figures_of(MODEL, RUN, make_step_time_result(), device_machine)
        figures["contenders"][OURS]["allocated_bytes"] = 0
    else:
        figures = speed.figures_of(MODEL, RUN, make_step_time_result(**changes), device_machine)
    with pytest.raises(AssertionError, match=message):
        speed.check(figures, "cuda")


def test_smaller_devices_get_smaller_cases() -> None:
    by_name = {model.name: model for model in MODELS}
    large, slices = by_name["gpt2 1.3b s2048"], by_name["llama 7b slice s2048"]
    fitted_runs = [fit_model(large, gigabytes * GIB) for gigabytes in (139, 80, 40, 16)]
    assert [run and (run.batch_size, len(run.contenders)) for run in fitted_runs] == [(8, 2), (8, 2), (2, 2), None]
    sliced_runs = [fit_model(slices, gigabytes * GIB) for gigabytes in (139, 18, 16)]
    assert [run and (run.model_sizes.num_layers, run.contenders[-1]) for run in sliced_runs] == [
        (5, "hf"),
        (2, "hf"),
        (2, "ours-fp8"),
    ]
    assert fit_model(large, 139 * GIB, below=8).batch_size == 4  # type: ignore[union-attr]
    assert fit_model(large, 139 * GIB, below=1) is None
    small = {model.name for model in MODELS if fit_model(model, int(15.8 * GIB))}
    assert {"t5-base s1024", "gpt2 125m s1024", "gpt2 350m s1024", "gpt2 350m s2048"} <= small


def test_case_without_memory_is_skipped_with_reason(tmp_path: Path) -> None:
    with pytest.raises(Skip, match=r"needs about \d\d\.\d GiB for 1 sequence of 2048 tokens, the device has 15\.8 GiB"):
        speed.fit_or_skip(MODELS[0], make_machine(tmp_path, 15.8))


def test_out_of_memory_retries_with_smaller_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def python(device_machine: Machine, *args: str) -> CompletedCommand:
        commands.append(list(args))
        if len(commands) == 1:
            return CompletedCommand(1, "torch.OutOfMemoryError: CUDA out of memory. Tried", 1.0)
        (tmp_path / "step_time.json").write_text(json.dumps(make_step_time_result()))
        return CompletedCommand(0, "", 1.0)

    monkeypatch.setattr(speed, "run_python", python)
    monkeypatch.setattr(speed, "require_bf16", lambda: None)
    _, figures = speed.measure(MODEL, make_machine(tmp_path), tmp_path)
    assert [args[args.index("--batch-size") + 1] for args in commands] == ["4", "2"]
    assert figures["batch_size"] == 2
    monkeypatch.setattr(
        speed, "run_python", lambda device_machine, *args: CompletedCommand(1, "error: no such device", 1.0)
    )
    with pytest.raises(AssertionError, match="no such device"):
        speed.measure(MODEL, make_machine(tmp_path), tmp_path)


def test_killed_case_has_figures_of_finished_contenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_until_killed(device_machine: Machine, *args: str) -> CompletedCommand:
        result = make_step_time_result()
        del result["contenders"]["hf"]
        (tmp_path / "step_time.json").write_text(json.dumps(result))
        return CompletedCommand(TIMED_OUT, "", 1.0)

    monkeypatch.setattr(speed, "require_bf16", lambda: None)
    monkeypatch.setattr(speed, "run_python", run_until_killed)
    text, figures = speed.measure(MODEL, make_machine(tmp_path), tmp_path)
    assert list(figures["contenders"]) == [OURS] and figures["errors"] == {"hf": "did not end in time"}
    assert text.endswith("hf was not measured: did not end in time")
    monkeypatch.setattr(speed, "run_python", lambda *_: CompletedCommand(TIMED_OUT, "", 1.0))
    with pytest.raises(AssertionError, match="did not end in time"):  # the file of the first run must not be used
        speed.measure(MODEL, make_machine(tmp_path), tmp_path)


def test_contenders_are_alone_in_memory_and_later_failures_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    teams: list[list[str]] = []
    saved: list[tuple[list[str], list[str]]] = []

    def take_turns(names: list[str], work: Work, rounds: int, method: str, profiled: list[str]) -> dict[str, Record]:
        teams.append([*names, *profiled])
        if names == ["hf"]:
            raise RuntimeError('"hf", rank 0: Traceback\n  ...\nOutOfMemoryError: CUDA out of memory\n')
        return {names[0]: Record(turns_s=[1.0]), PRODUCT: Record(turns_s=[0.5])}

    def alone(names: list[str]) -> Any:
        work = Work(sizes=SIZES, batch_size=4, steps=2, kind="cuda", dtype="bf16", threads=1)
        return step_time.take_turns_alone(
            names, work, 1, "spawn", [OURS], lambda records, errors: saved.append((list(records), list(errors)))
        )

    monkeypatch.setattr(step_time, "take_turns", take_turns)
    records, errors = alone([OURS, "hf", "plain"])
    assert teams == [[OURS, OURS], ["hf"], ["plain"]]
    assert list(records) == [OURS, "plain", PRODUCT] and records[PRODUCT].turns_s == [0.5, 0.5]
    assert errors == {"hf": "OutOfMemoryError: CUDA out of memory"}
    assert saved == [([OURS, PRODUCT], []), ([OURS, PRODUCT], ["hf"]), ([OURS, "plain", PRODUCT], ["hf"])]
    with pytest.raises(RuntimeError, match="out of memory"):
        alone(["hf", OURS])


def test_every_case_runs_step_time_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(speed, "run_python", lambda device_machine, *args: commands.append(list(args[1:])))
    for model in MODELS:
        run = FittedRun(model.slices[0], model.batches[0], model.contenders, 0)
        speed.run_benchmark(model, run, make_machine(tmp_path, device_type="cpu"), tmp_path)
        args = step_time.parse_args(commands[-1])
        assert step_time.work_of(args).sizes == run.model_sizes
        assert (args.contenders, args.batch_size) == (list(run.contenders), run.batch_size)
        assert args.look == (model.name in ("gpt2 1.3b s2048", "t5-base s1024"))
    names = [case.name for case in speed.cases(make_machine(tmp_path))]
    assert names.index("planner") == speed.PLANNED_AFTER and len(set(names)) == len(MODELS) + 1


def test_model_sizes_match_their_names() -> None:
    num_parameters = {
        model.title: registry.costs_of(make_run_config(model.slices[0], 1, "cuda")).num_parameters for model in MODELS
    }
    expected = {"GPT-2 125M": 125e6, "GPT-2 350M": 355e6, "GPT-2 1.3B": 1.3e9, "T5-base": 223e6}
    assert {title: num_parameters[title] for title in expected} == pytest.approx(expected, rel=0.03)
    layers = 6.74e9 - 2 * 32000 * 4096  # of LLaMA 7B
    assert num_parameters["LLaMA 7B, a slice"] == pytest.approx(layers * 5 / 32 + 2 * 32000 * 4096, rel=0.01)


def test_every_model_has_both_lengths_and_all_contenders() -> None:
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
def test_data_sheet_is_selected_by_name_and_memory(name: str, gigabytes: float, sheet: str | None) -> None:
    assert speed.find_sheet(name, int(gigabytes * GIB)) == sheet


def test_planner_is_compared_with_measured_cases(tmp_path: Path) -> None:
    device_machine = make_machine(tmp_path, name="NVIDIA New 1")
    metadata = {"device": "x", "kind": "cuda", "commit": "c", "is_dry": False, "date": "2026-12-01"}
    device_machine.results = Results(tmp_path / "results.json", metadata)
    figures = speed.figures_of(MODEL, RUN, make_step_time_result(), device_machine)
    device_machine.results.add("speed", "measured", Verdict(PASSED, "", json.loads(json.dumps(figures))))
    device_machine.results.add("speed", "broken", Verdict("failed", ""))
    planned = gpu_machine("h200")
    comparisons = dict(speed.planned_times(device_machine, planned))
    assert set(comparisons) == {"measured"} and set(comparisons["measured"]) == {OURS}
    ms = speed.planner_ms(SIZES, 4, planned, "cuda")
    assert comparisons["measured"][OURS] == {"planner_ms": ms, "ms": 100.0, "planner_ratio": pytest.approx(ms / 100.0)}


def test_sizes_round_trip_through_json() -> None:
    for sizes in (SIZES, T5Sizes(num_layers=3), LlamaSizes(ff_hidden_size=96)):
        assert speed.FAMILIES[sizes.family](**json.loads(json.dumps(vars(sizes)))) == sizes


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_dry_run_passes(tmp_path: Path) -> None:
    """On a busy machine the part's time is over before its last case; a second start goes on there."""
    for _ in range(3):
        assert main(["--device", "cpu", "--out", str(tmp_path), "speed", "tables"]) == 0
    (path,) = tmp_path.glob("*.json")
    cases = json.loads(path.read_text())["parts"]["speed"]["cases"]
    assert {case["status"] for case in cases.values()} == {"passed"}
    assert len(cases["gpt2 1.3b s2048"]["figures"]["kernels"]) == 10
    assert set(cases["planner"]["figures"]["planned"]) == {"gpt2 1.3b s2048", "t5-base s1024"}
    assert {file.name for file in tmp_path.iterdir()} == {path.name, f"{path.stem}.md"}

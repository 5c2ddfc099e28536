"""Speed and memory of a step: ours, Hugging Face's model and a plain loop in the same run.

Each case is one run of ``benchmarks/step_time.py --alone`` (dropout 0, bf16), whose contenders follow one another, so
that each has the whole memory of the device. If one does not fit, the batch is reduced first, then contenders are
removed from the end of the list, then the model is reduced to fewer layers. If nothing fits, the case is skipped. A
case whose later contenders fail, or that is killed after the first one, has the figures of the others. Figures:

| key | meaning |
|---|---|
| title, family, seq_length, batch_size, sizes, parameters | the model of the run; ``sizes`` reconstructs it |
| product_flops, sheet_flops | FLOP/s of the matrix products of this run, and of the data sheet (None: unknown) |
| expected_bytes | expected memory of the largest contender |
| contenders | name -> the row below |
| errors | name -> error of a contender that was not measured |
| kernels, kernels_ms | of one step of ours: name, ms, share, count of the ten slowest; ms of all |
| attention | kernel that torch selects for each shape: kernel, query, key, dtype, has_mask, calls |
| attention_kernels | names of the attention kernels in the profile |
| look_error | error of the profiler; None if there is none |

| key of a contender | meaning |
|---|---|
| ms, ms_quartiles, tokens_per_s | of a step: median over rounds; quartiles |
| mfu, mfu_whole | MFU relative to the products of this run, counting half of causal attention, or all of it |
| mfu_sheet | MFU relative to the data sheet |
| allocated_bytes, reserved_bytes | peak memory of tensors, and of the allocator |
| compile_s, last_loss | seconds of torch.compile; loss of the last step |
| speed_of_ours | for other contenders: speed of ours relative to theirs, the median over rounds |
| estimated_bytes, memory_ratio | for ours: estimate of --dry-run, and its ratio to allocated_bytes |
| planner_ms, planner_ratio | for ours: the planner's estimate from the GPU's data sheet, and its ratio to ms |

Case "planner" calibrates the device as tools/plan.py does: ``machine``, ``seconds``, and ``planned``, case ->
contender -> ``planner_ms``, ``ms``, ``planner_ratio``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import LARGE, GPTSizes, LlamaSizes, Sizes, T5Sizes, make_config
from benchmarks.gpu.part import PASSED, TIMED_OUT, Case, CompletedCommand, Machine, Part, Skip, run_python
from megatron.costs.memory import Memory, peak_flops
from megatron.models import registry
from megatron.mpu.topology import Topology
from megatron.planner.calibrate import calibrate
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import DATA_SHEETS, gpu_machine
from megatron.planner.machine import Machine as Planned
from megatron.planner.microbenchmarks import TimingBudget
from megatron.training.estimates import stage_memory

OURS, COMPILED, FP8, HF, PLAIN = "ours", "ours-compiled", "ours-fp8", "hf", "plain"
FLAGS = {OURS: "", COMPILED: "--compile", FP8: "--fp8-format e4m3"}
"""Contender of ours -> its flags."""
GIB = 2**30
PROCESS_BYTES = 0.7 * GIB
"""Bytes that a process needs for the driver's context and the workspaces of libraries."""
USABLE_FRACTION, ALLOCATOR_FACTOR = 0.94, 1.1
"""Fraction of the device's memory that processes may use, and factor for the allocator's overhead in our runs."""
ACTIVATION_FACTOR, LOGIT_BYTES, WEIGHT_BYTES = 2.5, 16, 18
"""Memory of the other contenders, which train under autocast.

ACTIVATION_FACTOR: activations relative to ours, because norms and GELU are materialized in fp32. LOGIT_BYTES: bytes per
logit (16-bit and fp32 copies, softmax, both gradients). WEIGHT_BYTES: bytes per parameter (fp32, AdamW, 16-bit copy).
"""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One case of the part.

    Args:
        name: name of the case: model and sequence length.
        title: name of the model, in tables.
        slices: sizes of the model, the largest first; the later ones have fewer layers and are used if it does not fit.
        contenders: names of contenders; the first is always ours.
        batches: sequences in a step, the largest first.
        steps: steps in a turn.
        should_profile: profile one more step of ours.
    """

    name: str
    title: str
    slices: tuple[Sizes, ...]
    contenders: tuple[str, ...]
    batches: tuple[int, ...]
    steps: int = 5
    rounds: int = 5
    should_profile: bool = False
    limit_s: float = 150.0


@dataclass(frozen=True)
class FittedRun:
    """The configuration of a run that fits: sizes, sequences per step, contenders, and bytes of the largest one."""

    model_sizes: Sizes
    batch_size: int
    contenders: tuple[str, ...]
    expected_bytes: int


def gpt2(layers: int, hidden: int, heads: int, length: int) -> tuple[Sizes, ...]:
    """Return the sizes of a GPT-2 with GPT-2's vocabulary, padded to a multiple of 64."""
    return (
        GPTSizes(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=50304, seq_length=length),
    )


def t5_base(length: int) -> tuple[Sizes, ...]:
    """Return the sizes of T5-base with inputs of ``length`` tokens."""
    return (T5Sizes(num_layers=12, hidden_size=768, num_attention_heads=12, enc_seq_length=length),)


def llama_7b(length: int) -> tuple[Sizes, ...]:
    """Return the sizes of 5 and 2 layers of LLaMA 7B with its width, vocabulary and head."""
    slices = (replace(LARGE["llama"], num_layers=layers, seq_length=length) for layers in (5, 2))
    return tuple(slices)


SMALL, MEDIUM, XL = (12, 768, 12), (24, 1024, 16), (24, 2048, 16)
MODELS = (
    Model(
        name="gpt2 1.3b s2048", title="GPT-2 1.3B", slices=gpt2(*XL, 2048), contenders=(OURS, COMPILED),
        batches=(8, 4, 2, 1), steps=3, should_profile=True, limit_s=220.0,
    ),
    Model(
        name="t5-base s1024", title="T5-base", slices=t5_base(1024), contenders=(OURS, COMPILED, HF),
        batches=(16, 8, 4, 2, 1), should_profile=True,
    ),
    Model(
        name="gpt2 125m s1024", title="GPT-2 125M", slices=gpt2(*SMALL, 1024), contenders=(OURS, COMPILED, HF, PLAIN),
        batches=(16, 8, 4, 2, 1),
    ),
    Model(
        name="llama 7b slice s2048", title="LLaMA 7B, a slice", slices=llama_7b(2048), contenders=(OURS, FP8, HF),
        batches=(4, 2, 1), steps=3,
    ),
    Model(
        name="gpt2 350m s1024", title="GPT-2 350M", slices=gpt2(*MEDIUM, 1024), contenders=(OURS, HF, PLAIN),
        batches=(16, 8, 4, 2, 1),
    ),
    Model(
        name="gpt2 1.3b s1024", title="GPT-2 1.3B", slices=gpt2(*XL, 1024), contenders=(OURS, HF, PLAIN),
        batches=(8, 4, 2, 1), steps=3,
    ),
    Model(
        name="gpt2 350m s2048", title="GPT-2 350M", slices=gpt2(*MEDIUM, 2048), contenders=(OURS, COMPILED),
        batches=(8, 4, 2, 1),
    ),
    Model(
        name="t5-base s2048", title="T5-base", slices=t5_base(2048), contenders=(OURS, COMPILED), batches=(8, 4, 2, 1),
    ),
    Model(
        name="gpt2 125m s2048", title="GPT-2 125M", slices=gpt2(*SMALL, 2048), contenders=(OURS, COMPILED),
        batches=(8, 4, 2, 1),
    ),
    Model(
        name="llama 7b slice s1024", title="LLaMA 7B, a slice", slices=llama_7b(1024), contenders=(OURS, COMPILED),
        batches=(8, 4, 2, 1), steps=3,
    ),
)  # fmt: skip
"""Models of all cases, the most important first."""

_TOY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
TOYS: Mapping[str, tuple[Sizes, str]] = {
    "gpt2 1.3b s2048": (GPTSizes(**_TOY, seq_length=32), OURS),
    "t5-base s1024": (T5Sizes(**_TOY, enc_seq_length=32), OURS),
    "gpt2 125m s1024": (GPTSizes(**_TOY, seq_length=32), PLAIN),
    "llama 7b slice s2048": (LlamaSizes(**_TOY, seq_length=32, ff_hidden_size=176), HF),
}
"""Case of the dry run -> its sizes and its only contender."""


def models(*, is_dry: bool) -> Iterator[Model]:
    """Yield the cases; in a dry run, a few at toy sizes with one contender each."""
    for model in MODELS:
        if not is_dry:
            yield model
        elif model.name in TOYS:
            model_sizes, contender = TOYS[model.name]
            yield replace(
                model, slices=(model_sizes,), contenders=(contender,), batches=(2,), steps=1, rounds=1, limit_s=300.0
            )


def make_run_config(model_sizes: Sizes, batch_size: int, device_type: str, contender: str = OURS) -> Any:
    """Return the configuration of our run on that type of device, in bf16, or in fp32 on a CPU."""
    dtype = "fp32" if device_type == "cpu" else "bf16"
    flags = f"--batch-size {batch_size} --{dtype} --device {device_type} --train-iters 1000"
    return make_config(model_sizes, f"{flags} {FLAGS.get(contender, '')}")


def estimate_memory(model_sizes: Sizes, batch_size: int, device_type: str, contender: str = OURS) -> Memory:
    """Return the memory of our run as estimated by ``--dry-run``."""
    config = make_run_config(model_sizes, batch_size, device_type, contender)
    bounds = registry.costs_of(config).stage_bounds(1)
    (memory,) = stage_memory(config, Topology(pipe=1, data=1, tensor=1), bounds, config.precision.dtype)
    return memory


@cache
def expected_bytes(model_sizes: Sizes, batch_size: int, contender: str) -> float:
    """Return the approximate GPU memory of a contender's process in bytes."""
    memory = estimate_memory(model_sizes, batch_size, "cuda", contender)
    if contender in FLAGS:
        return ALLOCATOR_FACTOR * memory.total + PROCESS_BYTES
    parameters = registry.costs_of(make_config(model_sizes)).num_parameters
    targets = model_sizes.target_length if isinstance(model_sizes, T5Sizes) else model_sizes.seq_length
    logits = batch_size * targets * model_sizes.vocab_size * LOGIT_BYTES
    return WEIGHT_BYTES * parameters + ACTIVATION_FACTOR * memory.activations + logits + PROCESS_BYTES


def fit_model(model: Model, memory_bytes: int, below: int | None = None) -> FittedRun | None:
    """Return the configuration of ``model`` that fits in ``memory_bytes``; None if none fits.

    Args:
        below: only consider batches of fewer sequences, because a batch of ``below`` did not fit in practice.
    """
    available_bytes = (
        USABLE_FRACTION * memory_bytes - PROCESS_BYTES
    )  # the process that multiplies matrices needs memory, too
    batches = [batch for batch in model.batches if below is None or batch < below]
    for model_sizes in model.slices:
        for num_contenders in range(len(model.contenders), 0, -1):
            for batch in batches:
                names = model.contenders[:num_contenders]
                expected = max(expected_bytes(model_sizes, batch, name) for name in names)
                if expected <= available_bytes:
                    return FittedRun(model_sizes, batch, names, int(expected))
    return None


STEP_TIME_JSON = "step_time.json"
PLANNER = "planner"
PLANNED_AFTER = 5
"""Number of cases that run before the case "planner", which compares its estimates with them."""
FAMILIES: Mapping[str, type[Sizes]] = {
    model_sizes.family: model_sizes for model_sizes in (GPTSizes, T5Sizes, LlamaSizes)
}
OUT_OF_MEMORY = "out of memory"


def cases(machine: Machine) -> list[Case]:
    """Return the cases, the most important first."""
    result = [
        Case(model.name, partial(measure, model), model.limit_s, is_exclusive=True)
        for model in models(is_dry=machine.is_dry)
    ]
    result.insert(PLANNED_AFTER, Case(PLANNER, compare_planner, limit_s=150.0, is_exclusive=True))
    return result


def measure(model: Model, machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    """Time one model; if its memory is not sufficient in practice, repeat with fewer sequences."""
    if machine.device_type == "cuda":
        require_bf16()
    run = fit_or_skip(model, machine)
    while (process := run_benchmark(model, run, machine, folder)).code and OUT_OF_MEMORY in process.text.lower():
        smaller = fit_model(model, machine.memory_bytes, below=run.batch_size)
        if smaller is None:
            break
        run = smaller
    is_killed = process.code == TIMED_OUT and (folder / STEP_TIME_JSON).exists()
    if not is_killed:
        process.check()
    result = json.loads((folder / STEP_TIME_JSON).read_text(encoding="utf-8"))
    if is_killed:
        missing = set(run.contenders) - set(result["contenders"])
        result["errors"] = dict.fromkeys(sorted(missing), "did not end in time") | result["errors"]
    figures = figures_of(model, run, result, machine)
    check(figures, machine.device_type)
    return summary_line(figures), figures


def require_bf16() -> None:
    """Check that the GPU supports bf16 products.

    Raises:
        Skip: the GPU does not support them.
    """
    import torch

    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skip("the benchmark uses bf16, which this GPU does not support")


def fit_or_skip(model: Model, machine: Machine) -> FittedRun:
    """Return the configuration of ``model`` that fits on this machine.

    Raises:
        Skip: nothing fits.
    """
    if machine.is_dry:
        return FittedRun(model.slices[0], model.batches[0], model.contenders, 0)
    run = fit_model(model, machine.memory_bytes)
    if run is None:
        min_bytes = expected_bytes(model.slices[-1], model.batches[-1], OURS)
        raise Skip(
            f"needs about {min_bytes / GIB:.1f} GiB for {model.batches[-1]} sequence of "
            f"{model.slices[-1].tokens_per_sample} tokens, the device has {machine.memory_bytes / GIB:.1f} GiB"
        )
    return run


def run_benchmark(model: Model, run: FittedRun, machine: Machine, folder: Path) -> CompletedCommand:
    """Run the benchmark, which writes its result to ``folder``."""
    words = [
        word for name, size in vars(run.model_sizes).items() for word in ("--" + name.replace("_", "-"), str(size))
    ]
    words += ["--model", run.model_sizes.family, "--batch-size", str(run.batch_size), "--contenders", *run.contenders]
    words += ["--steps", str(model.steps), "--rounds", str(model.rounds), "--device", machine.device_type]
    words += ["--product-side", "128", "--threads", "1"] * machine.is_dry
    words += ["--look"] * model.should_profile + ["--alone", "--json", str(folder / STEP_TIME_JSON)]
    (folder / STEP_TIME_JSON).unlink(missing_ok=True)
    return run_python(machine, "benchmarks/step_time.py", *words)


def figures_of(model: Model, run: FittedRun, result: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Return the figures of a case from the benchmark's result."""
    sheet = find_sheet(machine.name, machine.memory_bytes) if machine.device_type == "cuda" else None
    planner_machine = gpu_machine(sheet) if sheet else None
    profile = result["contenders"][OURS]["looked"] if OURS in result["contenders"] else {}
    return {
        "title": model.title,
        "family": run.model_sizes.family,
        "seq_length": run.model_sizes.tokens_per_sample
        if not isinstance(run.model_sizes, T5Sizes)
        else run.model_sizes.enc_seq_length,
        "batch_size": run.batch_size,
        "sizes": vars(run.model_sizes),
        "parameters": registry.costs_of(
            make_run_config(run.model_sizes, run.batch_size, machine.device_type)
        ).num_parameters,
        "product_flops": result["peak_flops_per_s"],
        "sheet_flops": result["sheet_flops_per_s"],
        "expected_bytes": run.expected_bytes,
        "contenders": {
            name: row_of(name, row, run, planner_machine, machine.device_type)
            for name, row in result["contenders"].items()
        },
        "kernels": profile.get("kernels", []),
        "kernels_ms": profile.get("kernels_ms"),
        "attention": profile.get("attention", []),
        "attention_kernels": profile.get("attention_kernels", []),
        "look_error": profile.get("error"),
        "errors": result["errors"],
    }


def row_of(
    name: str, row: Mapping[str, Any], run: FittedRun, planner_machine: Planned | None, device_type: str
) -> dict[str, Any]:
    """Return the figures of one contender; ``planner_machine`` is the planner's description of the machine."""
    figures: dict[str, Any] = {
        "ms": row["ms_per_step"],
        "ms_quartiles": row["ms_quartiles"],
        "tokens_per_s": row["tokens_per_s"],
        "mfu": row["mfu"],
        "mfu_whole": row["mfu_whole"],
        "mfu_sheet": row["mfu_sheet"],
        "allocated_bytes": row["peak_memory_bytes"],
        "reserved_bytes": row["reserved_memory_bytes"],
        "compile_s": row["compile_s"],
        "last_loss": row["losses"][-1],
    }
    if name not in FLAGS:
        ours = row.get("speed_of_ours", {})
        return figures | {"speed_of_ours": {our_name: middle for our_name, (_, middle, _) in ours.items()}}
    memory = estimate_memory(run.model_sizes, run.batch_size, device_type, name).total
    is_counted = device_type != "cpu"  # on a CPU the whole process is measured, including libraries
    figures |= {"estimated_bytes": memory, "memory_ratio": memory / row["peak_memory_bytes"] if is_counted else None}
    ms = (
        None
        if planner_machine is None
        else planner_ms(run.model_sizes, run.batch_size, planner_machine, device_type, name)
    )
    return figures | {"planner_ms": ms, "planner_ratio": None if ms is None else ms / row["ms_per_step"]}


def planner_ms(
    model_sizes: Sizes, batch_size: int, planner_machine: Planned, device_type: str, contender: str = OURS
) -> float:
    """Return the planner's estimate of our step on one device of ``planner_machine``, in milliseconds."""
    config = make_run_config(model_sizes, batch_size, device_type, contender)
    return 1e3 * Planner(config, planner_machine).estimate(layout_of(config, 1)).step_s


def find_sheet(name: str, memory_bytes: int) -> str | None:
    """Return the planner's key for the GPU ``name``; None if its data sheet is unknown.

    If several GPUs have the same data sheet, the one with the nearest memory size is returned.
    """
    peak = peak_flops(name)
    words = set(name.upper().replace("-", " ").split())
    known = [
        (abs(sheet.gigabytes * 1e9 - memory_bytes), key)
        for key, sheet in DATA_SHEETS.items()
        if peak_flops(sheet.peak_key) == peak
        and all(any(model_word in word for word in words) for model_word in sheet.peak_key.split())
    ]
    return min(known)[1] if peak and known else None


def check(figures: Mapping[str, Any], device_type: str) -> None:
    """Check that the figures are plausible.

    Raises:
        AssertionError: a figure is not plausible.
    """
    for name, row in figures["contenders"].items():
        assert math.isfinite(row["last_loss"]), f"the loss of {name} must be finite, got {row['last_loss']}"
        assert 0.0 < row["mfu"] < 1.0, f"MFU of {name} must be between 0 and 1, got {row['mfu']}"
        if device_type != "cpu":
            allocated, reserved = row["allocated_bytes"], row["reserved_bytes"]
            assert 0 < allocated <= reserved, (
                f"{name} must reserve at least the {allocated} allocated bytes, got {reserved}"
            )


def summary_line(figures: Mapping[str, Any]) -> str:
    """Return the summary of a case in one line."""
    parts = [
        f"{figures['title']}, {figures['parameters'] / 1e6:.0f} M parameters, {figures['batch_size']} x "
        f"{figures['seq_length']}",
        *(_contender_line(name, row) for name, row in figures["contenders"].items()),
    ]
    if kernels := sorted({shape["kernel"] for shape in figures["attention"]}):
        parts.append(f"attention {', '.join(kernels)}")
    if figures["look_error"]:
        parts.append(f"no profile: {figures['look_error']}")
    parts += [f"{name} was not measured: {error}" for name, error in figures["errors"].items()]
    return "; ".join(parts)


def _contender_line(name: str, row: Mapping[str, Any]) -> str:
    texts = [f"{name} {row['ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s, MFU {row['mfu']:.3f}"]
    if row["mfu_sheet"] is not None:
        texts.append(f"{row['mfu_sheet']:.3f} of the data sheet")
    texts.append(f"{row['allocated_bytes'] / GIB:.2f} GiB allocated, {row['reserved_bytes'] / GIB:.2f} reserved")
    for key, title in (("memory_ratio", "memory"), ("planner_ratio", "planner")):
        if row.get(key) is not None:
            texts.append(f"{title} estimated / measured {row[key]:.3f}")
    return ", ".join(texts)


def compare_planner(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    """Calibrate one device, and compare the planner's estimates with the measurements so far."""
    toy_options = {
        "timing_budget": TimingBudget(
            window_s=0.01, windows=1, num_repetitions=1, max_side=256, num_elements=2**14, max_hidden_size=64
        ),
        "round_s": 0.01,
    }
    start_time = time.monotonic()
    calibrated = calibrate(1, machine.device_type, report=lambda text: None, **(toy_options if machine.is_dry else {}))
    seconds = time.monotonic() - start_time
    rows = dict(planned_times(machine, calibrated))
    ratios = [
        f"{case} {name} {row['planner_ratio']:.3f}" for case, by_name in rows.items() for name, row in by_name.items()
    ]
    figures = {"machine": json.loads(calibrated.to_json()), "seconds": seconds, "planned": rows}
    return f"calibrated in {seconds:.0f} s; time of a step, planned / measured: {', '.join(ratios) or 'none'}", figures


def planned_times(machine: Machine, planner_machine: Planned) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each measured case, and the planner's times for ours."""
    verdicts = machine.results.of("speed") if machine.results else {}
    for name, verdict in verdicts.items():
        figures = verdict.figures
        if verdict.status != PASSED or name == PLANNER:
            continue
        model_sizes = FAMILIES[figures["family"]](**figures["sizes"])
        rows = {}
        for contender in FLAGS:
            if contender in figures["contenders"]:
                measured = figures["contenders"][contender]["ms"]
                ms = planner_ms(model_sizes, figures["batch_size"], planner_machine, machine.device_type, contender)
                rows[contender] = {"planner_ms": ms, "ms": measured, "planner_ratio": ms / measured}
        if rows:
            yield name, rows


PART = Part(
    name="speed",
    description="MFU, tokens/s and memory of ours, Hugging Face's and a plain loop; kernels; accuracy of the estimates",
    cases=cases,
    budget_s=400.0,
)

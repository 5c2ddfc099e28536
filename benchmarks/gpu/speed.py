"""How fast a step is and what it holds: ours beside Hugging Face's model and a plain loop, in the same run.

Each case is one run of ``benchmarks/step_time.py`` (dropout 0, bf16), whose contenders take turns and hold their
memory at once. Where they do not all find room, the batch gets smaller, then contenders are left out from the end, then
the model is a smaller slice; at last the case is skipped. Figures of a case:

| key | what it is |
|---|---|
| title, family, seq_length, batch_size, sizes, parameters | the model as it was run; ``sizes`` makes it anew |
| product_flops, sheet_flops | FLOP/s of the matrix products of this run, and of the data sheet (None: not known) |
| expected_bytes | what all contenders were expected to hold together |
| contenders | name -> the row below |
| kernels, kernels_ms | of one step of ours: name, ms, share, count of the ten longest; ms of all |
| attention | what torch chose for each shape: kernel, query, key, dtype, has_mask, calls |
| attention_kernels | names of the kernels that the profiler saw for it |
| look_error | why there is no profile, else None |

| key of a contender | what it is |
|---|---|
| ms, ms_quartiles, tokens_per_s | of a step: median over rounds; quartiles |
| mfu, mfu_whole, mfu_sheet | over the products, with half of causal attention counted, or all; over the data sheet |
| allocated_bytes, reserved_bytes | the most that tensors had, and that the allocator had |
| compile_s, last_loss | |
| speed_of_ours | of others: how many times as fast ours is, by the median of rounds |
| estimated_bytes, memory_ratio | of ours: what --dry-run says, and that over allocated_bytes |
| planner_ms, planner_ratio | of ours: what the planner says of this GPU's data sheet, and that over ms |

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

from benchmarks.contenders import LARGE, GPTSizes, LlamaSizes, Sizes, T5Sizes, config_of
from benchmarks.gpu.part import PASSED, Case, Done, Machine, Part, Skip, python
from megatron.costs.memory import Memory, peak_flops
from megatron.models import registry
from megatron.mpu.topology import Topology
from megatron.planner.calibrate import calibrate
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import SHEETS, device
from megatron.planner.machine import Machine as Planned
from megatron.planner.microbenchmarks import TimingBudget
from megatron.training.estimates import stage_memory

OURS, COMPILED, HF, PLAIN = "ours", "ours-compiled", "hf", "plain"
GIB = 2**30
OF_A_PROCESS = 0.7 * GIB
"""Of each contender's process: the driver's context and the libraries' work space."""
USABLE, MARGIN = 0.94, 1.1
"""Share of the device that processes may fill, and what the allocator adds to ours."""
WRITTEN_OUT, LOGIT_BYTES, WEIGHT_BYTES = 2.5, 16, 18
"""Of other people's step under autocast: activations over ours (norms and GELU in fp32, written out), bytes of a logit
(16-bit and fp32, their softmax, both gradients), bytes of a parameter (fp32 with AdamW, and the copy in 16 bits)."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One case of the part.

    Args:
        name: of the case: model and sequence length.
        title: of the model, in tables.
        slices: its sizes, the largest first; more than one where only a part of the model is meant to fit.
        contenders: the first is always ours.
        batches: sequences in a step, the largest first.
        steps: in a turn.
        has_look: one more step of ours is taken under the profiler.
    """

    name: str
    title: str
    slices: tuple[Sizes, ...]
    contenders: tuple[str, ...]
    batches: tuple[int, ...]
    steps: int = 5
    rounds: int = 5
    has_look: bool = False
    limit_s: float = 150.0


@dataclass(frozen=True)
class Fitted:
    """What of a model is run: sizes, sequences in a step, contenders, bytes that they are expected to hold together."""

    sizes: Sizes
    batch_size: int
    contenders: tuple[str, ...]
    expected_bytes: int


def gpt2(layers: int, hidden: int, heads: int, length: int) -> tuple[Sizes, ...]:
    """Return the sizes of a GPT-2 with its vocabulary, padded to a multiple of 64 as everybody has it."""
    return (
        GPTSizes(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=50304, seq_length=length),
    )


def t5_base(length: int) -> tuple[Sizes, ...]:
    """Return the sizes of T5-base with inputs of so many tokens."""
    return (T5Sizes(num_layers=12, hidden_size=768, num_attention_heads=12, enc_seq_length=length),)


def llama_7b(length: int) -> tuple[Sizes, ...]:
    """Return 5 and 2 layers of LLaMA 7B with its width, vocabulary and head."""
    slices = (replace(LARGE["llama"], num_layers=layers, seq_length=length) for layers in (5, 2))
    return tuple(slices)


SMALL, MEDIUM, XL = (12, 768, 12), (24, 1024, 16), (24, 2048, 16)
MODELS = (
    Model(
        name="gpt2 1.3b s2048", title="GPT-2 1.3B", slices=gpt2(*XL, 2048), contenders=(OURS, COMPILED),
        batches=(8, 4, 2, 1), steps=3, has_look=True, limit_s=220.0,
    ),
    Model(
        name="t5-base s1024", title="T5-base", slices=t5_base(1024), contenders=(OURS, COMPILED, HF),
        batches=(16, 8, 4, 2, 1), has_look=True,
    ),
    Model(
        name="gpt2 125m s1024", title="GPT-2 125M", slices=gpt2(*SMALL, 1024), contenders=(OURS, COMPILED, HF, PLAIN),
        batches=(16, 8, 4, 2, 1),
    ),
    Model(
        name="llama 7b slice s2048", title="LLaMA 7B, a slice", slices=llama_7b(2048), contenders=(OURS, HF),
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
"""The most telling first."""

_TOY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
TOYS: Mapping[str, tuple[Sizes, str]] = {
    "gpt2 1.3b s2048": (GPTSizes(**_TOY, seq_length=32), OURS),
    "t5-base s1024": (T5Sizes(**_TOY, enc_seq_length=32), OURS),
    "gpt2 125m s1024": (GPTSizes(**_TOY, seq_length=32), PLAIN),
    "llama 7b slice s2048": (LlamaSizes(**_TOY, seq_length=32, ff_hidden_size=176), HF),
}
"""Case of the dry form -> its sizes and its one contender."""


def models(*, is_dry: bool) -> Iterator[Model]:
    """Yield the cases; of the dry form a few at toy sizes with a contender each."""
    for model in MODELS:
        if not is_dry:
            yield model
        elif model.name in TOYS:
            sizes, contender = TOYS[model.name]
            yield replace(
                model, slices=(sizes,), contenders=(contender,), batches=(2,), steps=1, rounds=1, limit_s=300.0
            )


def config_for(sizes: Sizes, batch_size: int, kind: str, contender: str = OURS) -> Any:
    """Return the configuration of a run of ours on that kind of device, in bf16; on a CPU in fp32."""
    dtype = "fp32" if kind == "cpu" else "bf16"
    compiled = "--compile" if contender == COMPILED else ""
    return config_of(sizes, f"--batch-size {batch_size} --{dtype} --device {kind} --train-iters 1000 {compiled}")


def estimated(sizes: Sizes, batch_size: int, kind: str, contender: str = OURS) -> Memory:
    """Return what ``--dry-run`` says that ours holds."""
    config = config_for(sizes, batch_size, kind, contender)
    bounds = registry.costs_of(config).stage_bounds(1)
    (memory,) = stage_memory(config, Topology(pipe=1, data=1, tensor=1), bounds, config.precision.dtype)
    return memory


@cache
def expected_bytes(sizes: Sizes, batch_size: int, contender: str) -> float:
    """Return about how much of a GPU a contender's process takes."""
    memory = estimated(sizes, batch_size, "cuda", contender)
    if contender in (OURS, COMPILED):
        return MARGIN * memory.total + OF_A_PROCESS
    parameters = registry.costs_of(config_of(sizes)).num_parameters
    targets = sizes.target_length if isinstance(sizes, T5Sizes) else sizes.seq_length
    logits = batch_size * targets * sizes.vocab_size * LOGIT_BYTES
    return WEIGHT_BYTES * parameters + WRITTEN_OUT * memory.activations + logits + OF_A_PROCESS


def fitted(model: Model, memory_bytes: int, below: int | None = None) -> Fitted | None:
    """Return what of ``model`` finds room in so many bytes, None for nothing.

    Args:
        below: only batches of fewer sequences: with ``below`` there was no room after all.
    """
    room = USABLE * memory_bytes - OF_A_PROCESS  # of the process that multiplies matrices
    batches = [batch for batch in model.batches if below is None or batch < below]
    for sizes in model.slices:
        for number in range(len(model.contenders), 0, -1):
            for batch in batches:
                names = model.contenders[:number]
                expected = sum(expected_bytes(sizes, batch, name) for name in names)
                if expected <= room:
                    return Fitted(sizes, batch, names, int(expected))
    return None


PLANNER = "planner"
PLANNED_AFTER = 5
"""Cases ahead of the planner's, which it is compared with."""
FAMILIES: Mapping[str, type[Sizes]] = {sizes.family: sizes for sizes in (GPTSizes, T5Sizes, LlamaSizes)}
OUT_OF_MEMORY = "out of memory"


def cases(machine: Machine) -> list[Case]:
    """Return the cases, the most telling first."""
    made = [
        Case(model.name, partial(measure, model), model.limit_s, alone=True) for model in models(is_dry=machine.is_dry)
    ]
    made.insert(PLANNED_AFTER, Case(PLANNER, plan, limit_s=150.0, alone=True))
    return made


def measure(model: Model, machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    """Time one model; where its memory is not enough after all, again with fewer sequences."""
    if machine.kind == "cuda":
        require_bf16()
    run = room_for(model, machine)
    while (done := timed(model, run, machine, folder)).code and OUT_OF_MEMORY in done.text.lower():
        smaller = fitted(model, machine.memory_bytes, below=run.batch_size)
        if smaller is None:
            break
        run = smaller
    done.check()
    told = json.loads((folder / "step_time.json").read_text(encoding="utf-8"))
    figures = figures_of(model, run, told, machine)
    check(figures, machine.kind)
    return line_of(figures), figures


def require_bf16() -> None:
    """Check that the GPU multiplies in bf16 itself.

    Raises:
        Skip: it does not.
    """
    import torch

    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skip("times are those of bf16, which this GPU does not have")


def room_for(model: Model, machine: Machine) -> Fitted:
    """Return what of ``model`` this machine has room for.

    Raises:
        Skip: nothing.
    """
    if machine.is_dry:
        return Fitted(model.slices[0], model.batches[0], model.contenders, 0)
    found = fitted(model, machine.memory_bytes)
    if found is None:
        least = expected_bytes(model.slices[-1], model.batches[-1], OURS)
        raise Skip(
            f"needs about {least / GIB:.1f} GiB for {model.batches[-1]} sequence of "
            f"{model.slices[-1].tokens_per_sample} tokens, the device has {machine.memory_bytes / GIB:.1f} GiB"
        )
    return found


def timed(model: Model, run: Fitted, machine: Machine, folder: Path) -> Done:
    """Run the benchmark; its result lies in ``folder``."""
    words = [word for name, size in vars(run.sizes).items() for word in ("--" + name.replace("_", "-"), str(size))]
    words += ["--model", run.sizes.family, "--batch-size", str(run.batch_size), "--contenders", *run.contenders]
    words += ["--steps", str(model.steps), "--rounds", str(model.rounds), "--device", machine.kind]
    words += ["--product-side", "128", "--threads", "1"] * machine.is_dry
    words += ["--look"] * model.has_look + ["--json", str(folder / "step_time.json")]
    return python(machine, "benchmarks/step_time.py", *words)


def figures_of(model: Model, run: Fitted, told: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Return the figures of a case from the benchmark's result."""
    sheet = sheet_of(machine.name, machine.memory_bytes) if machine.kind == "cuda" else None
    planned = device(sheet) if sheet else None
    looked = told["contenders"][OURS]["looked"] if OURS in told["contenders"] else {}
    return {
        "title": model.title,
        "family": run.sizes.family,
        "seq_length": run.sizes.tokens_per_sample if not isinstance(run.sizes, T5Sizes) else run.sizes.enc_seq_length,
        "batch_size": run.batch_size,
        "sizes": vars(run.sizes),
        "parameters": registry.costs_of(config_for(run.sizes, run.batch_size, machine.kind)).num_parameters,
        "product_flops": told["peak_flops_per_s"],
        "sheet_flops": told["sheet_flops_per_s"],
        "expected_bytes": run.expected_bytes,
        "contenders": {name: row_of(name, row, run, planned, machine.kind) for name, row in told["contenders"].items()},
        "kernels": looked.get("kernels", []),
        "kernels_ms": looked.get("kernels_ms"),
        "attention": looked.get("attention", []),
        "attention_kernels": looked.get("attention_kernels", []),
        "look_error": looked.get("error"),
    }


def row_of(name: str, row: Mapping[str, Any], run: Fitted, planned: Planned | None, kind: str) -> dict[str, Any]:
    """Return the figures of one contender; ``planned`` is the machine as the planner knows it."""
    found: dict[str, Any] = {
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
    if name not in (OURS, COMPILED):
        ours = row.get("speed_of_ours", {})
        return found | {"speed_of_ours": {who: middle for who, (_, middle, _) in ours.items()}}
    memory = estimated(run.sizes, run.batch_size, kind, name).total
    is_counted = kind != "cpu"  # of a CPU the process is measured, libraries included
    found |= {"estimated_bytes": memory, "memory_ratio": memory / row["peak_memory_bytes"] if is_counted else None}
    ms = None if planned is None else planner_ms(run.sizes, run.batch_size, planned, kind, name)
    return found | {"planner_ms": ms, "planner_ratio": None if ms is None else ms / row["ms_per_step"]}


def planner_ms(sizes: Sizes, batch_size: int, planned: Planned, kind: str, contender: str = OURS) -> float:
    """Return the milliseconds that the planner gives a step of ours on one device of ``planned``."""
    config = config_for(sizes, batch_size, kind, contender)
    return 1e3 * Planner(config, planned).estimate(layout_of(config, 1)).step_s


def sheet_of(name: str, memory_bytes: int) -> str | None:
    """Return the planner's name of a GPU, of those with the same data sheet the one with memory nearest to this."""
    peak = peak_flops(name)
    words = set(name.upper().replace("-", " ").split())
    known = [
        (abs(sheet.gigabytes * 1e9 - memory_bytes), key)
        for key, sheet in SHEETS.items()
        if peak_flops(sheet.part) == peak and all(any(part in word for word in words) for part in sheet.part.split())
    ]
    return min(known)[1] if peak and known else None


def check(figures: Mapping[str, Any], kind: str) -> None:
    """Check that the figures can be.

    Raises:
        AssertionError: one of them cannot.
    """
    for name, row in figures["contenders"].items():
        assert math.isfinite(row["last_loss"]), f"the loss of {name} must be a number, got {row['last_loss']}"
        assert 0.0 < row["mfu"] < 1.0, f"MFU of {name} must be between 0 and 1, got {row['mfu']}: products or FLOPs"
        if kind != "cpu":
            allocated, reserved = row["allocated_bytes"], row["reserved_bytes"]
            assert 0 < allocated <= reserved, f"{name} must reserve what it allocates, got {reserved} and {allocated}"


def line_of(figures: Mapping[str, Any]) -> str:
    """Return a case in one line."""
    parts = [
        f"{figures['title']}, {figures['parameters'] / 1e6:.0f} M parameters, {figures['batch_size']} x "
        f"{figures['seq_length']}",
        *(_contender_line(name, row) for name, row in figures["contenders"].items()),
    ]
    if chosen := sorted({each["kernel"] for each in figures["attention"]}):
        parts.append(f"attention {', '.join(chosen)}")
    if figures["look_error"]:
        parts.append(f"no profile: {figures['look_error']}")
    return "; ".join(parts)


def _contender_line(name: str, row: Mapping[str, Any]) -> str:
    told = [f"{name} {row['ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s, MFU {row['mfu']:.3f}"]
    if row["mfu_sheet"] is not None:
        told.append(f"{row['mfu_sheet']:.3f} of the data sheet")
    told.append(f"{row['allocated_bytes'] / GIB:.2f} GiB allocated, {row['reserved_bytes'] / GIB:.2f} reserved")
    for key, what in (("memory_ratio", "memory"), ("planner_ratio", "planner")):
        if row.get(key) is not None:
            told.append(f"{what} estimated / measured {row[key]:.3f}")
    return ", ".join(told)


def plan(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    """Calibrate one device, and compare what the planner then says with what was measured before."""
    toy = {
        "pace": TimingBudget(window_s=0.01, windows=1, turns=1, largest_side=256, numbers=2**14, widest=64),
        "round_s": 0.01,
    }
    begin = time.monotonic()
    found = calibrate(1, machine.kind, report=lambda text: None, **(toy if machine.is_dry else {}))
    seconds = time.monotonic() - begin
    rows = dict(planned_of(machine, found))
    ratios = [
        f"{case} {name} {row['planner_ratio']:.3f}" for case, by_name in rows.items() for name, row in by_name.items()
    ]
    figures = {"machine": json.loads(found.to_json()), "seconds": seconds, "planned": rows}
    return f"calibrated in {seconds:.0f} s; time of a step, planned / measured: {', '.join(ratios) or 'none'}", figures


def planned_of(machine: Machine, planned: Planned) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case that was measured, and the planner's times of ours."""
    verdicts = machine.results.of("speed") if machine.results else {}
    for name, verdict in verdicts.items():
        figures = verdict.figures
        if verdict.status != PASSED or name == PLANNER:
            continue
        sizes = FAMILIES[figures["family"]](**figures["sizes"])
        rows = {}
        for contender in (OURS, COMPILED):
            if contender in figures["contenders"]:
                measured = figures["contenders"][contender]["ms"]
                ms = planner_ms(sizes, figures["batch_size"], planned, machine.kind, contender)
                rows[contender] = {"planner_ms": ms, "ms": measured, "planner_ratio": ms / measured}
        if rows:
            yield name, rows


PART = Part(
    name="speed",
    about="MFU, tokens/s and memory of ours, Hugging Face's and a plain loop; kernels; estimates against measurement",
    cases=cases,
    budget_s=400.0,
)

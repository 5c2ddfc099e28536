"""Time our step of GPT-2, T5, LLaMA or Youtu together with Hugging Face's and a plain loop's, in one run.

    python benchmarks/step_time.py --json step_time.json
    python benchmarks/step_time.py --contenders ours plain
    python benchmarks/step_time.py --model t5 --strict
    python benchmarks/step_time.py --size 1.3b --json step_time.json        # one GPU
    python benchmarks/step_time.py --size 1.3b --look                       # and the kernels that take longest

Every contender runs in a separate process on the same tokens from the same weights, with dropout 0 and all cores; their
first losses must agree. Contenders take turns of a few steps in rotating order. The benchmark reports medians over
rounds and ratios within rounds.

With --alone, one contender at a time is in memory, so that each can use all of a GPU. Ratios then compare turns at
different times, which is accurate on a GPU with a steady clock. A contender that fails is reported, and the others are
measured.

MFU is relative to products of two square matrices (2048 x 2048 on a CPU, 8192 x 8192 on a GPU), which take turns with
the contenders. It counts the causal half of GPT-2's attention (6 L a d s) and all of T5's. "whole" counts all of
GPT-2's attention (12 L a d s), as nanoGPT and PaLM do. "sheet" is relative to the peak in the data sheet of known GPUs.
The last lines compare the results with the required values (``bars``). Size flags depend on the model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import torch

from benchmarks.contenders import (
    CONTENDERS,
    LARGE,
    LARGE_BATCH,
    GPTSizes,
    LlamaSizes,
    Sizes,
    T5Sizes,
    YoutuSizes,
    make_config,
)
from benchmarks.step_profile import profile_step
from benchmarks.turns import Bar, Team, measurement_info, quartiles, ratio_quartiles, rotated
from megatron import device
from megatron.costs import cost, decoder_cost, memory
from megatron.models import registry

# Each contender runs in a separate process.

PRODUCT = "matrix product"
PRODUCTS = {"cpu": (2048, 8)}
"""Type of device -> side of the square matrices, and number of products in a turn."""
GPU_PRODUCTS = (8192, 50)
"""Side and number of products on a GPU. Smaller products would be limited by launches, and MFU could exceed 1."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The task of every contender.

    Args:
        product_side: side of the multiplied matrices; 0 for the default of the device type.
    """

    sizes: Sizes
    batch_size: int
    steps: int
    kind: str
    dtype: str
    threads: int
    product_side: int = 0


@dataclass
class Record:
    """Measurements of one contender.

    Args:
        turns_s: seconds of each turn.
        cpu_s: processor seconds of each turn over all threads; with one thread a busy machine does not distort them.
        reserved_bytes: peak memory reserved by the device's allocator, including its unused memory; 0 on a CPU.
        profile: result of ``profile_step`` for one more step, if requested.
        compile_s: seconds spent in torch.compile, including the warm-up turn.
    """

    turns_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_loss: float = math.nan
    peak_bytes: int = 0
    idle_bytes: int = 0
    compile_s: float = 0.0
    reserved_bytes: int = 0
    profile: dict[str, Any] = field(default_factory=dict)


def products_of(device_type: str, product_side: int = 0) -> tuple[int, int]:
    """Return the side of the square matrices on this type of device, and the number of products in a turn."""
    side, num_products = PRODUCTS.get(device_type, GPU_PRODUCTS)
    return product_side or side, num_products


def take_turns(
    names: Sequence[str], work: Work, rounds: int, start_method: str = "spawn", profiled_names: Sequence[str] = ()
) -> dict[str, Record]:
    """Return a record for each contender and for the matrix product; the first turn is a warm-up and not recorded.

    Args:
        profiled_names: contenders that run one more step at the end, under the profiler.

    Raises:
        RuntimeError: a contender failed; the message has its traceback.
    """
    with ExitStack() as stack:
        teams = {}
        for name in [*names, PRODUCT]:
            teams[name] = Team(name, StepWorker, (name, work), start_method=start_method, threads=work.threads)
            stack.callback(teams[name].close)
        for team in teams.values():
            team.ready()
        records = {name: Record(idle_bytes=team.ask("idle_bytes")[0]) for name, team in teams.items()}
        for round_idx in range(rounds + 1):
            for name in rotated(teams, round_idx):
                (answer,) = teams[name].ask("turn", round_idx * work.steps)
                record = records[name]
                record.losses.append(answer["losses"][-1])
                record.peak_bytes, record.reserved_bytes = answer["peak_bytes"], answer["reserved_bytes"]
                record.compile_s = answer["compile_s"]
                if round_idx == 0:
                    record.first_loss = answer["losses"][0]
                else:
                    record.turns_s.append(answer["seconds"])
                    record.cpu_s.append(answer["cpu_s"])
        for name in profiled_names:
            (records[name].profile,) = teams[name].ask("look")
        return records


def take_turns_alone(
    names: Sequence[str], work: Work, rounds: int, start_method: str, profiled_names: Sequence[str],
    save: Callable[[dict[str, Record], dict[str, str]], object],
) -> tuple[dict[str, Record], dict[str, str]]:  # fmt: skip
    """Return records as ``take_turns`` does, while only one contender and the matrix product are in memory.

    Args:
        save: function that is called with the results so far after each contender, because the run may be killed.

    Returns:
        The records, and the errors of contenders that failed.

    Raises:
        RuntimeError: the first contender failed; the message has its traceback.
    """
    records: dict[str, Record] = {}
    errors: dict[str, str] = {}
    product = Record()
    for name in names:
        try:
            by_name = take_turns([name], work, rounds, start_method, [name] if name in profiled_names else [])
        except RuntimeError as error:
            if not records:
                raise
            errors[name] = str(error).strip().splitlines()[-1]
        else:
            product.turns_s += by_name[PRODUCT].turns_s
            records[name] = by_name[name]
        save({**records, PRODUCT: product}, errors)
    return {**records, PRODUCT: product}, errors


class StepWorker:
    """One contender, or the matrix product, in its process."""

    def __init__(self, name: str, work: Work, rank: int) -> None:
        self._name, self._work = name, work
        self._turn = _product(work) if name == PRODUCT else _contender(name, work)

    def idle_bytes(self) -> int:
        return device.peak_memory_bytes(self._work.kind)

    def turn(self, first: int) -> dict[str, Any]:
        """Take a turn from step ``first`` on; return its seconds, processor seconds, losses and peak memory."""
        device_type = self._work.kind
        device.synchronize(device_type)
        start, cpu_start = time.perf_counter(), time.process_time()
        losses = [float(loss) for loss in self._turn(first)]
        device.synchronize(device_type)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        return {
            "seconds": seconds, "cpu_s": cpu_s, "losses": losses, "compile_s": _compile_s(self._name),
            "peak_bytes": device.peak_memory_bytes(device_type), "reserved_bytes": _reserved_bytes(device_type),
        }  # fmt: skip

    def look(self) -> dict[str, Any]:
        """Run one step under the profiler and return the result."""
        return _profile_or_error(lambda: profile_step(lambda: self._turn(0, 1), self._work.kind))


def _profile_or_error(profile: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the profile, or the error if the profiler does not work, so that the measured times are not lost."""
    try:
        return profile()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _reserved_bytes(device_type: str) -> int:
    return 0 if device_type == "cpu" else torch.accelerator.max_memory_reserved()


def _compile_s(name: str) -> float:
    if not name.endswith("-compiled"):
        return 0.0
    from megatron.training.callbacks.compile_meter import process_compile_cost

    return process_compile_cost().seconds


def _contender(name: str, work: Work) -> Any:
    step = CONTENDERS[work.sizes.model][name](work.sizes, work.batch_size, work.kind, work.dtype)

    def turn(first: int, steps: int = work.steps) -> list[Any]:
        return [step(work.sizes.batch(work.batch_size, step_idx)) for step_idx in range(first, first + steps)]

    return turn


def _product(work: Work) -> Any:
    """Return a function that runs one turn of matrix products, whose rate is the reference for MFU."""
    bound_device, (side, num_products) = device.bind(work.kind, 0), products_of(work.kind, work.product_side)
    a, b = (torch.randn(side, side, device=bound_device, dtype=device.DTYPES[work.dtype]) for _ in range(2))
    out = torch.empty_like(a)

    def turn(_: int) -> list[float]:
        for _ in range(num_products):
            torch.mm(a, b, out=out)
        return [0.0]

    return turn


# Required performance of our step relative to other contenders in the same run. On a CPU the requirements were chosen
# for the small sizes, but all sizes are compared with them; on a GPU only the large sizes are.

Contenders = dict[str, dict[str, Any]]


MIN_MFU = {"gpt2": {"ours": 0.72, "ours-compiled": 0.80}}
"""Family -> contender -> required fraction of the rate of this machine's matrix products, on a CPU."""
MIN_SHEET_MFU = {"gpt2": 0.50, "t5": 0.42}
"""Family -> required fraction of the peak in the GPU's data sheet, for the faster of ours and ours-compiled."""
MIN_SPEED_RATIOS = {
    "gpt2": {
        ("ours", "plain"): 1.05,
        ("ours-compiled", "plain-compiled"): 1.05,
        ("ours", "hf"): 1.25,
        ("ours-compiled", "hf"): 1.4,
    },
    "t5": {("ours", "hf"): 1.3},
}
"""Family -> (contender, other contender) -> required median ratio of their speeds, on a CPU."""
MEMORY_REFERENCES = {"gpt2": ("hf", "plain"), "t5": ("hf",)}


def single_value_bar(name: str, value: float, **bounds: float) -> Bar:
    """Return the bar of a value that is measured once."""
    return Bar(name, (value, value, value), **bounds)


def bars(family: str, device_type: str, contenders: Contenders, *, is_large: bool = False) -> Iterator[Bar]:
    """Yield the required values for which the contenders took part.

    Args:
        is_large: the sizes are the large ones.
    """
    if device_type != "cpu" and not is_large:
        return
    if device_type != "cpu":
        shares = [contenders[name]["mfu_sheet"] for name in ("ours", "ours-compiled") if name in contenders]
        known = [share for share in shares if share is not None]
        if known and family in MIN_SHEET_MFU:
            yield single_value_bar("MFU of the data sheet", max(known), at_least=MIN_SHEET_MFU[family])
        return
    for name, share in MIN_MFU.get(family, {}).items():
        if name in contenders:
            yield single_value_bar(f"MFU of {name}", contenders[name]["mfu"], at_least=share)
    for (ours, other), ratio in MIN_SPEED_RATIOS.get(family, {}).items():
        if ours in contenders and other in contenders:
            yield Bar(f"speed of {ours} over {other}", contenders[other]["speed_of_ours"][ours], at_least=ratio)
    for other in MEMORY_REFERENCES.get(family, ()):
        for ours in ("ours", "ours-compiled"):
            if ours in contenders and other in contenders:
                share = contenders[ours]["peak_memory_bytes"] / contenders[other]["peak_memory_bytes"]
                yield single_value_bar(f"peak memory of {ours} over {other}'s", share, at_most=1.0)


MODELS: dict[str, type[Sizes]] = {
    model_sizes.model: model_sizes for model_sizes in (GPTSizes, T5Sizes, LlamaSizes, YoutuSizes)
}
OURS = ("ours", "ours-compiled")
FP8 = "ours-fp8"
NAMES = {
    "gpt2": (*OURS, FP8, "hf", "plain", "plain-compiled"),
    "t5": (*OURS, "hf"),
    "llama": (*OURS, FP8, "hf"),
    "youtu": (*OURS, "hf"),
}
BARRED = {
    "gpt2": (*OURS, "hf", "plain", "plain-compiled"),
    "t5": (*OURS, "hf"),
    "llama": (*OURS, "hf"),
    "youtu": (*OURS, "hf"),
}
"""Family -> contenders to which the requirements refer; at the large sizes only ours fit in memory together."""
SMALL, LARGE_NAME = "small", "1.3b"
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt2", help="default: %(default)s")
    parser.add_argument(
        "--size", choices=(SMALL, LARGE_NAME), default=SMALL, help="preset of the size flags (default: %(default)s)"
    )
    early_args = parser.parse_known_args([word for word in words if word not in ("-h", "--help")])[0]
    family, is_large = early_args.model, early_args.size == LARGE_NAME
    model_sizes: Sizes = LARGE[family] if is_large else MODELS[family]()
    for name, default in vars(model_sizes).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help="default: %(default)s")
    batch_size = LARGE_BATCH[family] if is_large else 8
    parser.add_argument("--batch-size", type=int, default=batch_size, help="sequences in a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measured turns of each contender (default: 7)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps in a turn (default: 3)")
    parser.add_argument(
        "--contenders", nargs="+", choices=NAMES[family], default=OURS if is_large else BARRED[family],
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--product-side", type=int, default=0, help="matrix size (default: 2048; on a GPU 8192)")
    parser.add_argument("--look", action="store_true", help="profile one more step of ours")
    parser.add_argument("--alone", action="store_true", help="keep only one contender at a time in memory")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a bar is not met")
    return parser.parse_args(words)


def work_of(args: argparse.Namespace) -> Work:
    """Return the work that the options describe, in fp32 on CPU and bf16 on CUDA."""
    device_type = device.choose(args.device)
    sizes_class = MODELS[args.model]
    model_sizes = sizes_class(**{name: getattr(args, name) for name in vars(sizes_class())})
    dtype = "bf16" if device_type == "cuda" else "fp32"
    return Work(
        sizes=model_sizes,
        batch_size=args.batch_size,
        steps=args.steps,
        kind=device_type,
        dtype=dtype,
        threads=args.threads,
        product_side=args.product_side,
    )


def summarize(records: dict[str, Record], work: Work) -> dict[str, Any]:
    """Return the figures of each contender.

    ``speed_of_ours`` is the speed of ours relative to the contender by round, as quartiles, for each of OURS.
    ``cpu_speed_of_ours`` uses processor time instead of wall time.
    """
    side, num_products = products_of(work.kind, work.product_side)
    peak = 2.0 * side**3 * num_products / statistics.median(records[PRODUCT].turns_s)
    sheet = None if work.kind == "cpu" else memory.peak_flops(device.name(work.kind))
    tokens = work.batch_size * work.sizes.tokens_per_sample
    costs = registry.costs_of(make_config(work.sizes))
    flops, full_attention_flops = (
        costs.flops_per_step(work.batch_size),
        _full_attention_flops(costs, work.batch_size),
    )
    contenders = {}
    for name, record in records.items():
        if name == PRODUCT:
            continue
        step_s = statistics.median(record.turns_s) / work.steps
        row: dict[str, Any] = {
            "ms_per_step": step_s * 1e3,
            "ms_quartiles": [1e3 * seconds / work.steps for seconds in quartiles(record.turns_s)],
            "fastest_ms_per_step": min(record.turns_s) / work.steps * 1e3,
            "cpu_ms_per_step": statistics.median(record.cpu_s) / work.steps * 1e3,
            "turns_s": record.turns_s,
            "cpu_s": record.cpu_s,
            "tokens_per_s": tokens / step_s,
            "mfu": flops / step_s / peak,
            "mfu_whole": full_attention_flops / step_s / peak,
            "mfu_sheet": flops / step_s / sheet if sheet else None,
            "compile_s": record.compile_s,
            "peak_memory_bytes": record.peak_bytes,
            "reserved_memory_bytes": record.reserved_bytes,
            "memory_before_steps_bytes": record.idle_bytes,
            "losses": record.losses,
            "looked": record.profile,
        }
        for our_name in OURS if name not in OURS else ():
            if our_name in records:
                row.setdefault("speed_of_ours", {})[our_name] = ratio_quartiles(
                    record.turns_s, records[our_name].turns_s
                )
                row.setdefault("cpu_speed_of_ours", {})[our_name] = ratio_quartiles(
                    record.cpu_s, records[our_name].cpu_s
                )
        contenders[name] = row
    return {
        "peak_flops_per_s": peak,
        "sheet_flops_per_s": sheet,
        "flops_per_step": flops,
        "contenders": contenders,
        "bars": [vars(bar) | {"is_met": bar.is_met} for bar in _bars(work, contenders)],
    }


def check_first_losses(losses: dict[str, float], tolerance: float) -> None:
    """Raise RuntimeError if contenders differ by more than ``tolerance`` before the first update of the weights."""
    is_finite = all(map(math.isfinite, losses.values()))
    if not is_finite or max(losses.values()) - min(losses.values()) > tolerance:
        raise RuntimeError(f"the first losses of all contenders must agree within {tolerance}, got {losses}")


def measurement_conditions(work: Work) -> dict[str, Any]:
    """Return the conditions of the measurement: command, commit, versions, machine and sizes."""
    info = measurement_info()
    processor = info.pop("processor")
    machine = {
        "device": device.name(work.kind) if work.kind == "cuda" else processor,
        "threads": work.threads,
        "memory_bytes": device.total_memory_bytes(work.kind),
    }
    model_sizes = vars(work.sizes) | {"batch_size": work.batch_size}
    return info | {"machine": machine, "model": work.sizes.model, "dtype": work.dtype, "sizes": model_sizes}


def table(result: dict[str, Any]) -> str:
    """Return the result as lines of text."""
    names = f"{'ms/step':>9}{'CPU ms':>9}{'tokens/s':>10}{'MFU':>7}{'whole':>7}{'sheet':>7}{'peak MiB':>10}"
    lines = [" " * 16 + names + f"{'last loss':>11}{'compile s':>11}"]
    for name, row in result["contenders"].items():
        sheet = f"{row['mfu_sheet']:7.3f}" if row["mfu_sheet"] is not None else f"{'':7}"
        compiled = f"{row['compile_s']:11.1f}" if row["compile_s"] else ""
        lines.append(
            f"{name:16}{row['ms_per_step']:9.1f}{row['cpu_ms_per_step']:9.1f}{row['tokens_per_s']:10.0f}{row['mfu']:7.3f}"
            f"{row['mfu_whole']:7.3f}{sheet}{row['peak_memory_bytes'] / 2**20:10.0f}{row['losses'][-1]:11.5f}{compiled}"
        )
    for name, row in result["contenders"].items():
        for our_name, (low, middle, high) in row.get("speed_of_ours", {}).items():
            by_cpu = row["cpu_speed_of_ours"][our_name][1]
            spread = f"quartiles {low:.3f}, {high:.3f}"
            lines.append(f"{our_name} is {middle:.3f} times as fast as {name} ({spread}); by CPU time {by_cpu:.3f}")
    lines += [f"{name} failed: {error}" for name, error in result.get("errors", {}).items()]
    for name, row in result["contenders"].items():
        lines += _kernels(name, row["looked"]) if row["looked"] else []
    lines.append(f"matrix product {result['peak_flops_per_s'] / 1e9:.0f} GFLOP/s = MFU 1")
    lines += [Bar(**{name: value for name, value in bar.items() if name != "is_met"}).text for bar in result["bars"]]
    return "\n".join(lines)


def main(argv: list[str] | None = None, start_method: str = "spawn") -> dict[str, Any]:
    """Run the contenders, print the table and write the JSON file."""
    args = parse_args(argv)
    work = work_of(args)
    conditions = measurement_conditions(work)  # before the turns, so that an error here does not lose measurements
    profiled_names = [name for name in ("ours",) if args.look and name in args.contenders]

    def write(records: dict[str, Record], errors: dict[str, str]) -> dict[str, Any]:
        result = conditions | summarize(records, work) | {"errors": errors}
        if args.json:
            temporary = args.json.with_suffix(".tmp")
            temporary.write_text(json.dumps(result, indent=1) + "\n")
            os.replace(temporary, args.json)
        return result

    if args.alone:
        records, errors = take_turns_alone(args.contenders, work, args.rounds, start_method, profiled_names, save=write)
    else:
        records, errors = take_turns(args.contenders, work, args.rounds, start_method, profiled_names), {}
    result = write(records, errors)
    print(table(result))
    first_losses = {name: record.first_loss for name, record in records.items() if name != PRODUCT}
    check_first_losses(first_losses, LOSS_TOLERANCE[work.dtype])
    if args.strict and not all(bar["is_met"] for bar in result["bars"]):
        sys.exit(1)
    return result


def _kernels(name: str, profile: dict[str, Any]) -> Iterator[str]:
    if "error" in profile:
        yield f"no profile of {name}: {profile['error']}"
        return
    yield f"kernels of a step of {name}, {profile['kernels_ms']:.1f} ms in total:"
    for entry in profile["kernels"]:
        yield f"{entry['ms']:9.2f} ms {100 * entry['share']:5.1f} % {entry['count']:6} x {entry['name']}"
    for entry in profile["attention"]:
        yield f"attention of {entry['query']} on {entry['key']}: {entry['kernel']}, {entry['calls']} times"


def _bars(work: Work, contenders: dict[str, Any]) -> Iterator[Bar]:
    model = work.sizes.model
    return bars(model, work.kind, contenders, is_large=work.sizes == LARGE[model])


def _full_attention_flops(costs: cost.Costs, batch_size: int) -> float:
    """Return the FLOPs of a step if attention counts every query with every key, including masked keys."""
    if isinstance(costs, decoder_cost.DecoderCosts):
        return batch_size * costs.seq_length * costs.flops_per_token(causal=False)
    return costs.flops_per_step(batch_size)


if __name__ == "__main__":
    main()

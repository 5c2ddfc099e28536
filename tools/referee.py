"""Compare one training step of any PyTorch trainer in a parallel layout with one process, and name the wrong gradient.

    python tools/referee.py dumps/one dumps/tp2
    python tools/referee.py dumps/one dumps/tp2dp2 --axes tp=2,dp=2
    python tools/referee.py dumps/one dumps/tp2 --rename '^model\\.' '' --json
    python tools/referee.py my-llama/ dumps/tp2 --batch batch.pt        # our model as the one process

Dumps are written by the hook in tools/referee_hook.py, which any trainer can paste (docs/referee.md). Both runs start
from the same weights and read the same batch; the first one has one process, preferably in fp64. The tool assembles the
shards, compares loss, gradient norm and every gradient, and names the fault: a factor (x tp, / cp), a sum over an axis
that is missing, a part that counts twice, ranks without a gradient.

If the first folder is a Hugging Face folder of a supported model, our model computes the reference in fp64 from its
weights. --batch names a file of torch.save with "tokens" and "labels" [b, s]; labels of -100 are ignored, and the loss
is the mean over the others. The dump must have the parameter names of the folder, if necessary by --rename.

Exit code 0: equal. 1: different. 2: a dump is missing, damaged or of another model.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.arguments.argparse_parsers import OneLineParser

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.debug.referee.diagnosis import Comparison
    from megatron.debug.referee.dump_reader import Dump
    from megatron.debug.referee.scalars import ScalarComparison
    from megatron.debug.referee.verdict import Verdict

MAX_SHOWN = 20


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with code 2 and one line for values that are not accepted."""
    parser = OneLineParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("one", type=Path, help="dump folder of one process, the reference, or a Hugging Face folder")
    parser.add_argument("many", type=Path, help="dump folder of the layout")
    parser.add_argument(
        "--axes", type=parse_axes, metavar="NAME=SIZE,...",
        help="axes of the layout, the one with adjacent ranks first, for example tp=2,cp=1,dp=4 "
        "(default: the axes that the hook was called with)",
    )  # fmt: skip
    parser.add_argument(
        "--rename", nargs=2, action="append", default=[], metavar=("PATTERN", "REPLACEMENT"),
        help="regular expression that is replaced in the layout's parameter names; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--batch",
        type=Path,
        metavar="FILE",
        help="tokens and labels of the step, if the first folder is a Hugging Face one",
    )
    parser.add_argument(
        "--rtol", type=float, metavar="X",
        help="largest relative error (default: by the coarsest format of gradients, fp64 1e-6, fp32 1e-4, fp16 1e-2, "
        "bf16 5e-2)",
    )  # fmt: skip
    parser.add_argument(
        "--all", action="store_true", help=f"list all parameters (default: up to {MAX_SHOWN} wrong ones)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    flags = parser.parse_args(argv)
    if flags.rtol is not None and not 0 <= flags.rtol < math.inf:
        parser.error(f"--rtol must be a finite number of at least 0, got {flags.rtol}")
    if flags.all and flags.json:
        parser.error("--all has no effect with --json, which always lists all parameters. Remove one of them")
    for pattern, replacement in flags.rename:
        try:
            re.sub(pattern, replacement, "")
        except re.error as error:
            parser.error(
                f"--rename must be a regular expression and its replacement, got {pattern} {replacement}: {error}"
            )
    return flags


def parse_axes(text: str) -> dict[str, int]:
    """Parse "tp=2,dp=4"."""
    axes = {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
    if not all(name and size > 0 for name, size in axes.items()):
        raise ValueError(text)
    return axes


def main(argv: list[str] | None = None) -> int:
    """Compare the dumps of the command line; return the exit code."""
    flags = parse_args(argv)
    from megatron.debug.referee.dump_reader import read_dump
    from megatron.debug.referee.verdict import judge_step

    try:
        if (flags.batch is not None) != (flags.one / "config.json").is_file():
            raise ValueError(f"--batch and a Hugging Face folder (with config.json) need each other, got {flags.one}")
        one = read_dump(flags.one) if flags.batch is None else compute_reference(flags.one, flags.batch)
        verdict = judge_step(one, read_dump(flags.many, flags.axes, flags.rename), flags.rtol)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        print(f"referee.py: {error}", file=sys.stderr)
        return 2
    if flags.json:
        print(json.dumps(to_json_data(verdict), indent=1))
    else:
        report(verdict, flags.all)
    return 0 if verdict.is_equal else 1


def compute_reference(folder: Path, batch_path: Path) -> Dump:
    """Compute loss and gradients of our model in fp64 from the weights of a Hugging Face folder.

    Raises:
        CheckpointError: The folder is damaged or of a model that is not supported.
        ValueError: The batch cannot be used.
    """
    import torch

    from megatron.checkpoint.huggingface.config import config_from_huggingface, copy_names, format_of, read_json
    from megatron.checkpoint.huggingface.folder import read_tensors
    from megatron.checkpoint.huggingface.weights import (
        build_model,
        weights_from_huggingface,
        without_missing_mtp,
        without_zero_biases,
    )
    from megatron.debug.referee.dump_reader import Dump, Parameter, RankDump

    hf_config, tensors = read_json(folder, "config.json"), read_tensors(folder)
    model_type = hf_config["model_type"]
    config = without_missing_mtp(tensors, config_from_huggingface(hf_config), model_type)
    config = without_zero_biases(tensors, config, model_type)
    weights = weights_from_huggingface(tensors, config, model_type)
    hf_format = format_of(config, model_type)
    model = build_model(config)
    model.double().load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    tokens, labels = read_batch(batch_path, config.model.vocab_size or 0)
    logits = hf_format.model_logits(model.eval(), tokens)  # [b, s, v]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    grads = {
        name: torch.zeros_like(weights[name], dtype=torch.float64) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    hf_grads = hf_format.from_ours(grads, config)
    copies = copy_names(config, model_type)
    parameters = tuple(
        Parameter(name, tensor, hf_grads[name])
        for name, tensor in tensors.items()
        if name in hf_grads and name not in copies
    )
    return Dump(folder, (RankDump(0, {}, loss.item(), None, parameters),))


def read_batch(path: Path, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Read tokens and labels, both [b, s].

    Raises:
        ValueError: The file is damaged, or its entries have other shapes or ids than the model needs.
    """
    import torch

    requirement = f'--batch {path} must be written by torch.save({{"tokens": tokens, "labels": labels}}), both [b, s]'
    try:
        batch = torch.load(path, map_location="cpu", weights_only=True)
        tokens, labels = batch["tokens"].long(), batch["labels"].long()
    except OSError:
        raise
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(f"{requirement}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    if tokens.ndim != 2 or labels.shape != tokens.shape or not tokens.numel():
        raise ValueError(f"{requirement}, got {list(tokens.shape)} and {list(labels.shape)}")
    for name, ids in (("tokens", tokens), ("labels", labels[labels != -100])):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            bounds = f"{int(ids.min())} to {int(ids.max())}"
            raise ValueError(f"--batch {path}: {name} must be ids from 0 to {vocab_size - 1}, got {bounds}")
    return tokens, labels


def report(verdict: Verdict, show_all: bool) -> None:
    """Print loss and norm, the wrong gradients in the order of the forward pass, and the verdict."""
    columns = ["", "one process", "layout", "fault"]
    print_table("loss and gradient norm", columns, [scalar_row(scalar) for scalar in (verdict.loss, verdict.norm)])
    listed = list(verdict.gradients) if show_all else verdict.wrong[:MAX_SHOWN]
    if listed:
        columns = ["gradient", "shards x copies", "norm", "error", "where", "fault"]
        print_table("gradients in forward order", columns, [gradient_row(item) for item in listed])
        if len(listed) < len(verdict.wrong):
            print(f"and {len(verdict.wrong) - len(listed)} more wrong gradients (--all lists them)")
    for rank, local_name, name in list(verdict.renamed)[:MAX_SHOWN] if show_all else []:
        print(f"rank {rank}: {local_name} is {name} of the one process")
    print(f"verdict: {summarize(verdict)}", flush=True)


def scalar_row(scalar: ScalarComparison) -> list[str]:
    """Return the table cells of the loss or the gradient norm."""
    values = list(dict.fromkeys(f"{value:.8g}" for value in scalar.actual))
    text = ", ".join(values[:4]) + (", ..." if len(values) > 4 else "")
    fault = scalar.note if scalar.fault is None else "; ".join(filter(None, [scalar.fault.text, scalar.note]))
    return [scalar.name, "-" if scalar.expected is None else f"{scalar.expected:.8g}", text or "-", fault]


def gradient_row(item: Comparison) -> list[str]:
    """Return the table cells of a gradient."""
    return [
        item.name,
        f"{item.num_shards} x {item.num_copies}",
        f"{item.norm:.4g}",
        f"{item.error:.1e}",
        item.rows or "everywhere",
        item.fault.text if item.fault else "",
    ]


def summarize(verdict: Verdict) -> str:
    """Return the verdict, the last line of the output."""
    wrong, total = verdict.wrong, len(verdict.gradients)
    parts = [f"the loss is wrong: {verdict.loss.fault.text}"] if verdict.loss.fault else []
    if wrong:
        parts.append(summarize_gradients(wrong, total, with_faults=verdict.loss.fault is None))
    else:
        worst = max(verdict.gradients, key=lambda item: item.error)
        parts.append(
            f"all {total} gradients agree (worst error {worst.error:.1e}, {worst.name}; allowed {verdict.rtol:.0e})"
        )
    if verdict.norm.fault:
        parts.append(f"the gradient norm is wrong: {verdict.norm.fault.text}")
    return "; ".join(parts)


def summarize_gradients(wrong: list[Comparison], total: int, with_faults: bool) -> str:
    """Return the number of wrong gradients, and the first ones of the forward and of the backward pass.

    ``with_faults`` is False if the loss is wrong, because the gradients then follow from it.
    """
    first, last = (f"{item.name}{f' ({item.rows})' if item.rows else ''}" for item in (wrong[0], wrong[-1]))
    first_fault, last_fault = (
        f": {item.fault.text}" if item.fault and with_faults else "" for item in (wrong[0], wrong[-1])
    )
    if len(wrong) == 1:
        return f"1 of {total} gradients is wrong, {first}{first_fault}"
    if first_fault == last_fault:
        first_fault = ""
    start = f"{len(wrong)} of {total} gradients are wrong; first in the forward pass {first}{first_fault}"
    return f"{start}; first in the backward pass {last}{last_fault}"


def to_json_data(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as plain data; an infinite error becomes the text "inf"."""
    wrong = verdict.wrong
    return {
        "equal": verdict.is_equal,
        "verdict": summarize(verdict),
        "rtol": verdict.rtol,
        "first_wrong_forward": wrong[0].name if wrong else None,
        "first_wrong_backward": wrong[-1].name if wrong else None,
        "loss": scalar_to_json(verdict.loss),
        "gradient_norm": scalar_to_json(verdict.norm),
        "gradients": [gradient_to_json(item) for item in verdict.gradients],
        "renamed": [{"rank": rank, "layout": local, "one": name} for rank, local, name in verdict.renamed],
    }


def scalar_to_json(scalar: ScalarComparison) -> dict[str, Any]:
    """Return the comparison of the loss or the norm as plain data."""
    return {"one": scalar.expected, "layout": list(scalar.actual), "note": scalar.note, **fault_to_json(scalar)}


def gradient_to_json(item: Comparison) -> dict[str, Any]:
    """Return the comparison of a gradient as plain data."""
    error = item.error if math.isfinite(item.error) else "inf"
    return {"name": item.name, "norm": item.norm, "error": error, "where": item.rows, **fault_to_json(item)}


def fault_to_json(item: Comparison | ScalarComparison) -> dict[str, Any]:
    """Return the fault as plain data, all None if there is none."""
    fault = item.fault
    return {
        "fault": None if fault is None else fault.fault_type,
        "text": None if fault is None else fault.text,
        "factor": None if fault is None else fault.factor,
        "axis": None if fault is None else fault.axis,
    }


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table as wide as the terminal, or as wide as needed without a terminal."""
    from rich.table import Table

    from megatron import console

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print_table(table)


if __name__ == "__main__":
    sys.exit(main())

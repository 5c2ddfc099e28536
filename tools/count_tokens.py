"""Count documents and tokens of each corpus, in total and of each split, and the epochs that a run trains on them.

    python tools/count_tokens.py data/a data/b
    python tools/count_tokens.py --data-path 0.7 data/a 0.3 data/b --split 949,50,1 --seq-length 1024 --train-tokens 2e9

With --train-tokens the tokens of the run are divided over the corpora by weight (without weights, by size in tokens),
and the table shows the number of epochs of each corpus. Samples are counted as for GPT-2 without packing, where
neighbouring samples share one token.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.config.data_paths import parse_paths
from megatron.data.cache import IndexCache
from megatron.data.documents import Documents, count_documents, count_tokens
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.split import SPLIT_NAMES, split_by_hash, split_documents
from megatron.errors import DataError, exit_code

INTERRUPTED_EXIT_CODE = 130


@dataclass(frozen=True)
class Count:
    """Numbers of documents, tokens and, if a length is given, samples per epoch."""

    documents: int
    tokens: int
    samples: int | None


def parse_num_tokens(text: str) -> int:
    """Parse a number of tokens such as 2000000 or 2e9."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 1 <= value < 2**62:
        raise argparse.ArgumentTypeError(f"must be a number of tokens of at least 1, such as 2e9, got {text!r}")
    return int(text) if text.isdecimal() else round(value)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", nargs="*", metavar="PREFIX", help="paths without .bin and .idx")
    parser.add_argument(
        "--data-path", nargs="+", metavar="WEIGHT PREFIX", help="alternating weights and prefixes, as in training"
    )
    parser.add_argument("--split", help="also count each split, such as 949,50,1")
    parser.add_argument("--split-by", choices=("range", "hash"), help="same as in training (default: range)")
    parser.add_argument("--seq-length", type=int, metavar="L", help="also count samples of L tokens")
    parser.add_argument("--train-tokens", type=parse_num_tokens, metavar="N", help="tokens of a run, such as 2e9")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args(argv)
    if bool(args.prefix) == bool(args.data_path):
        parser.error("set either PREFIX arguments or --data-path with weights, not both")
    if len(set(args.prefix)) < len(args.prefix):
        parser.error(f"PREFIX arguments must not repeat, got {' '.join(args.prefix)}")
    if args.split_by and not args.split:
        parser.error("--split-by has no effect without --split. Add --split")
    if args.seq_length is not None and args.seq_length < 1:
        parser.error(f"--seq-length must be at least 1, got {args.seq_length}")
    return args


def read_corpora(args: argparse.Namespace) -> list[tuple[float | None, str]]:
    """Return (weight, prefix) of each corpus; the weight is None if none was given."""
    if args.prefix:
        return [(None, prefix) for prefix in args.prefix]
    words = args.data_path
    try:
        return list(parse_paths(words[0] if len(words) == 1 else shlex.join(words)))
    except ValueError as error:
        raise DataError(str(error)) from None


def count_corpora(args: argparse.Namespace) -> dict[str, Any]:
    """Return the counts in the form that --json prints."""
    rows: dict[str, dict[str, Any]] = {}
    weighted_prefixes = read_corpora(args)
    for weight, prefix in weighted_prefixes:
        dataset = IndexedDataset(prefix)
        rows[prefix] = asdict(counted(dataset, (0, dataset.num_documents), args.seq_length)) | {"weight": weight}
        rows[prefix]["splits"] = {
            name: asdict(counted(dataset, documents, args.seq_length))
            for name, documents in splits_of(dataset, args.split, args.split_by).items()
        }
    total = {key: sum(row[key] for row in rows.values()) for key in ("documents", "tokens")}
    if args.train_tokens:
        add_epochs(rows, args.train_tokens, args.seq_length)
    return {"corpora": rows, "total": total}


def splits_of(dataset: IndexedDataset, split: str | None, split_by: str | None) -> dict[str, Documents]:
    """Return the documents of train, valid and test; {} without ``split``."""
    if not split:
        return {}
    if split_by == "hash":
        return dict(zip(SPLIT_NAMES, split_by_hash(dataset, split, IndexCache()), strict=True))
    return dict(zip(SPLIT_NAMES, split_documents(dataset.num_documents, split), strict=True))


def counted(dataset: IndexedDataset, documents: Documents, seq_length: int | None) -> Count:
    """Return the counts of the given documents."""
    total = count_tokens(dataset.document_lengths, documents)
    samples = None if seq_length is None else max(total - 1, 0) // seq_length
    return Count(documents=count_documents(documents), tokens=total, samples=samples)


def add_epochs(rows: dict[str, dict[str, Any]], train_tokens: int, seq_length: int | None) -> None:
    """Add to each row the tokens, samples and epochs of its corpus in a run of ``train_tokens`` tokens.

    Raises:
        DataError: a corpus that the run uses has no training tokens, or less than one sample.
    """
    shares = {name: row["tokens"] if row["weight"] is None else row["weight"] for name, row in rows.items()}
    total_share = sum(shares.values())
    for name, row in rows.items():
        drawn_tokens = train_tokens * shares[name] / total_share if total_share else 0.0
        counts = row["splits"].get("train", row)
        available = counts["tokens"] if seq_length is None else counts["samples"]
        if drawn_tokens and not available:
            raise DataError(f"{name} has no complete training sample, got {counts['tokens']} tokens. Remove it.")
        row["train_tokens"] = round(drawn_tokens)
        if seq_length is None:
            row["epochs"] = drawn_tokens / counts["tokens"] if drawn_tokens else 0.0
        else:
            row["train_samples"] = math.ceil(drawn_tokens / seq_length)
            row["epochs"] = row["train_samples"] / counts["samples"] if drawn_tokens else 0.0


def table_lines(result: dict[str, Any]) -> list[str]:
    """Return the counts as lines of a table."""
    rows = [("corpus", "documents", "tokens", "samples", "drawn tokens", "drawn samples", "epochs")]
    for name, row in result["corpora"].items():
        epochs = f"{row['epochs']:.3f}" if "epochs" in row else ""
        rows.append(
            (
                name,
                *_cells(row),
                _format_count(row.get("train_tokens")),
                _format_count(row.get("train_samples")),
                epochs,
            )
        )
        rows += [(f"  {split}", *_cells(counts), "", "", "") for split, counts in row["splits"].items()]
    total = result["total"]
    if len(result["corpora"]) > 1:
        rows.append(("total", _format_count(total["documents"]), _format_count(total["tokens"]), "", "", "", ""))
    used_columns = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in used_columns}
    return [
        "  ".join(row[c].ljust(widths[c]) if c == 0 else row[c].rjust(widths[c]) for c in used_columns).rstrip()
        for row in rows
    ]


def _cells(counts: dict[str, Any]) -> tuple[str, str, str]:
    return _format_count(counts["documents"]), _format_count(counts["tokens"]), _format_count(counts["samples"])


def _format_count(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def main(argv: list[str] | None = None) -> int:
    """Count and print; return the exit code."""
    args = parse_args(argv)
    try:
        result = count_corpora(args)
    except KeyboardInterrupt:
        log.error("stopped")
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    print(json.dumps(result, indent=1) if args.json else "\n".join(table_lines(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

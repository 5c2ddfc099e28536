"""Turn text into token files for training.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer-path tokenizer.json --output-prefix data/corpus

writes data/corpus.bin, data/corpus.idx and data/corpus.meta.json; train on them with --data-path data/corpus.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log, tokenizer  # noqa: E402
from megatron.data import preprocess  # noqa: E402
from megatron.data.preprocess import sources  # noqa: E402
from megatron.errors import exit_code  # noqa: E402


def at_least(lowest: int) -> Callable[[str], int]:
    """Return a reader of whole numbers that refuses smaller ones."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {lowest}, got {text!r}")
        return int(text)

    return read


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the tool's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", type=Path, required=True, help="text files, in this order")
    parser.add_argument("--output-prefix", required=True, help="path of the output without .bin/.idx")
    parser.add_argument("--format", choices=sources.FORMATS, help="default: by name; .jsonl, else a document per file")
    parser.add_argument("--json-key", default="text", help="key of the text in JSON lines (default: text)")
    parser.add_argument("--tokenizer-type", choices=tokenizer.TYPES, help="default: by the files given")
    parser.add_argument("--tokenizer-path", help="tokenizers JSON file or SentencePiece .model")
    parser.add_argument("--vocab-file", help="vocab.json of a GPT-2 BPE")
    parser.add_argument("--merge-file", help="merges.txt of a GPT-2 BPE")
    parser.add_argument(
        "--workers", type=at_least(1), default=os.cpu_count() or 1, help="processes (default: one per CPU)"
    )
    parser.add_argument("--no-append-eod", action="store_true", help="no end-of-document token after each document")
    parser.add_argument("--max-bad-lines", type=at_least(0), default=0, help="bad lines to leave out before giving up")
    return parser.parse_args(argv)


def job_of(args: argparse.Namespace) -> preprocess.Job:
    """Return what the options ask for."""
    make_tokenizer = functools.partial(
        tokenizer.build,
        args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        tokenizer_path=args.tokenizer_path,
    )
    return preprocess.Job(
        inputs=args.input,
        output_prefix=args.output_prefix,
        make_tokenizer=make_tokenizer,
        format=args.format or sources.guess_format(args.input),
        json_key=args.json_key,
        append_eod=not args.no_append_eod,
        num_workers=args.workers,
        max_bad_lines=args.max_bad_lines,
    )


def main() -> int:
    """Run the job; return its exit code."""
    args = parse_args()
    try:
        job = job_of(args)
        summary = preprocess.run(job)
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    for bad in summary.bad:
        log.warning(f"left out {bad}")
    log.info(
        f"{args.output_prefix}.bin: {summary.num_documents} documents, {summary.num_tokens} tokens in "
        f"{summary.seconds:.1f} s ({summary.num_empty} empty and {summary.num_bad} bad left out, format {job.format})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

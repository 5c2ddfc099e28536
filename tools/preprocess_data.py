"""Encode text into token files for training.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer-path tokenizer.json --output-prefix data/corpus

This writes data/corpus.bin, data/corpus.idx and data/corpus.meta.json; train on them with --data-path data/corpus. An
interrupted job continues if --resume is added to its command. With --verify and without --input, the files of
--output-prefix are verified and some of their documents shown.

On several machines with a shared folder for inputs and outputs, a job array can encode the corpus in parts. A part that
was interrupted can be started again:

    python tools/preprocess_data.py --input ... --output-prefix data/corpus --part $SLURM_ARRAY_TASK_ID/16
    python tools/merge_data.py --input data/corpus.parts --output-prefix data/corpus
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log, object_store, tokenizer
from megatron.data import preprocess, token_upload
from megatron.errors import StopRequest, exit_code

NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

INPUT_FLAGS = {
    "--format": "format",
    "--json-key": "json_key",
    "--gigatoken": "gigatoken",
    "--no-append-eod": "no_append_eod",
    "--max-document-chars": "max_document_chars",
    "--max-bad-lines": "max_bad_lines",
    "--max-bad-fraction": "max_bad_fraction",
    "--resume": "resume",
    "--unit-bytes": "unit_bytes",
    "--part": "part",
    "--cluster": "cluster",
}
"""Flag -> attribute of ``args``, for flags that have an effect on a job but not with --verify."""


def integer_at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of integers that rejects values below ``minimum``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text!r}")
        return int(text)

    return parse


def parse_share(text: str) -> preprocess.Share:
    """Parse K/N, such as 3/16: part K of the units of work, divided into N parts."""
    try:
        return preprocess.Share.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        type=object_store.path_or_name,
        help="files and folders, also s3://..., in order; - for standard input",
    )
    add("--output-prefix", required=True, help="path of the output without .bin/.idx, also s3://...")
    add(
        "--work-dir",
        type=Path,
        default=Path("data"),
        help="local folder for parts and output before they are uploaded to an object store (default: data)",
    )
    add("--format", choices=preprocess.FORMATS, help="format of all inputs (default: by file name)")
    add("--json-key", nargs="+", default=["text"], help="key of the text, a.b for a nested one; several are joined")
    add("--tokenizer-type", choices=tokenizer.TYPES, help="default: by the tokenizer files")
    add("--tokenizer-path", help="file of the tokenizer: tokenizers JSON, SentencePiece .model, ...")
    add("--vocab-file", help="vocabulary: vocab.json of a GPT-2 BPE, ...")
    add("--merge-file", help="merges.txt of a GPT-2 BPE")
    add("--gigatoken", action="store_true", help="encode BPE with gigatoken if its ids match on a sample of the corpus")
    add(
        "--workers",
        type=integer_at_least(1),
        help=f"encoding processes (default: one per core, {NUM_CORES}; with --cluster all)",
    )
    add("--eod-token", metavar="NAME", help="end-of-document token (default: from the tokenizer's folder)")
    add("--no-append-eod", action="store_true", help="no end-of-document token after each document")
    add("--max-document-chars", type=integer_at_least(1), default=0, help="reject longer documents (default: no limit)")
    add("--max-bad-lines", type=integer_at_least(0), help="maximum number of bad lines to skip (default: 0)")
    add("--max-bad-fraction", type=fraction, help="maximum fraction of bad lines to skip")
    add("--resume", action="store_true", help="continue an interrupted job from its finished units")
    add(
        "--unit-bytes",
        type=integer_at_least(1 << 10),
        help="size of a unit of work (default: 4 to 64 MB, by input and workers)",
    )
    add(
        "--part",
        type=parse_share,
        metavar="K/N",
        help="encode every N-th unit starting with the K-th (K from 1) into PREFIX.parts. The N jobs may run at any "
        "time on any machine; tools/merge_data.py joins their output. A restarted job skips its finished units",
    )
    add(
        "--cluster",
        metavar="ADDRESS",
        help="encode on a Ray cluster whose machines access inputs and output by the same paths: HOST:PORT, or auto "
        "for the cluster in RAY_ADDRESS, otherwise a local one. Units of lost machines are encoded again",
    )
    add("--verify", action="store_true", help="verify the output and show some documents; without --input, only verify")
    add("--seed", type=int, default=0, help="seed for the choice of the documents that --verify shows (default: 0)")
    args = parser.parse_args(argv)
    if not args.input and not args.verify:
        parser.error("the following arguments are required: --input (or --verify, to check existing files)")
    unused = [flag for flag, name in INPUT_FLAGS.items() if getattr(args, name) != parser.get_default(name)]
    if unused and not args.input:
        parser.error(f"{', '.join(unused)} cannot be used without --input. Add --input")
    if args.part and args.cluster:
        parser.error("--part (independent jobs) cannot be combined with --cluster (one job). Remove one of them")
    if args.eod_token and args.no_append_eod:
        parser.error("--eod-token has no effect with --no-append-eod. Remove one of them")
    if args.part and args.verify:
        parser.error("--verify requires the complete output, so it cannot be combined with --part. Join the parts")
    if args.verify and object_store.is_remote(args.output_prefix):
        parser.error("--verify reads only local files. Remove it: uploads to a store are always verified")
    return args


def tokenizer_factory(args: argparse.Namespace) -> Callable[[], tokenizer.Tokenizer]:
    """Return a function without arguments that builds the tokenizer selected by the options."""
    return functools.partial(
        tokenizer.build,
        args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        tokenizer_path=args.tokenizer_path,
        eod_token=args.eod_token,
    )


def local_output_prefix(args: argparse.Namespace) -> str:
    """Return the local prefix of the output, which is in the work folder if the output is uploaded."""
    if object_store.is_remote(args.output_prefix):
        return token_upload.local_prefix(args.output_prefix, args.work_dir)
    return args.output_prefix


def make_job(args: argparse.Namespace) -> preprocess.Job:
    """Return the job that the options describe."""
    return preprocess.Job(
        inputs=args.input,
        output_prefix=local_output_prefix(args),
        upload_to=args.output_prefix if object_store.is_remote(args.output_prefix) else None,
        make_tokenizer=tokenizer_factory(args),
        format=args.format,
        json_keys=args.json_key,
        append_eod=not args.no_append_eod,
        num_workers=args.workers or (0 if args.cluster else NUM_CORES),
        max_bad_lines=args.max_bad_lines,
        max_bad_fraction=args.max_bad_fraction,
        max_document_chars=args.max_document_chars,
        unit_bytes=args.unit_bytes,
        resume=args.resume,
        use_gigatoken=args.gigatoken,
        share=args.part,
        cluster=args.cluster,
    )


def preprocess_corpus(args: argparse.Namespace) -> None:
    """Run the job and log its counts."""
    summary = preprocess.run(make_job(args))
    if summary.bad_path:
        bad_lines = "1 bad line was" if summary.num_bad == 1 else f"{summary.num_bad} bad lines were"
        log.warning(f"{bad_lines} skipped; {summary.bad_path} lists {'it' if summary.num_bad == 1 else 'them'}")
    resumed = (
        f", {summary.num_resumed} of {summary.num_units} units were finished before" if summary.num_resumed else ""
    )
    output = f"part {args.part} of {local_output_prefix(args)}" if args.part else f"{args.output_prefix}.bin"
    log.info(
        f"{output}: {summary.num_documents} documents, {summary.num_tokens} tokens from "
        f"{summary.num_bytes / 1e6:.1f} MB in {summary.seconds:.1f} s "
        f"({summary.num_empty} empty and {summary.num_bad} bad skipped{resumed})"
    )


def verify_output(args: argparse.Namespace) -> None:
    """Verify the output and show some of its documents."""
    has_tokenizer = args.tokenizer_path or args.vocab_file
    result = preprocess.verify(args.output_prefix, tokenizer_factory(args)() if has_tokenizer else None, seed=args.seed)
    for document, num_tokens, first_text in result.samples:
        log.info(f"document {document}, {num_tokens} tokens: {first_text}")
    checked_text = (
        "sizes, offsets, checksums" if result.has_sidecar else "sizes and offsets (no checksums: no .meta.json)"
    )
    log.info(
        f"{args.output_prefix} is valid: {result.num_documents} documents, {result.num_tokens} tokens; {checked_text}"
    )


def raise_stop_request(signal_number: int, frame: FrameType | None) -> None:
    """Signal handler that ends the job by raising StopRequest; unfinished units are lost."""
    raise StopRequest(f"stopped by {signal.Signals(signal_number).name}")


def main() -> int:
    """Run the tool and return the exit code."""
    args = parse_args()
    signal.signal(signal.SIGTERM, raise_stop_request)
    try:
        if args.input:
            preprocess_corpus(args)
        if args.verify:
            verify_output(args)
    except KeyboardInterrupt:
        log.error("stopped")
        return exit_code(StopRequest())
    except Exception as error:
        log.error(str(error) if isinstance(error, StopRequest) else f"error: {error}")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Train a vocabulary on your own text.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer.json

--model is bpe (byte-level, a `tokenizers` JSON file), wordpiece (BERT's, cased, the same type of file) or unigram (a
SentencePiece .model); all contain <|endoftext|>. The text is streamed. bpe and wordpiece store the distinct words
of the text in memory, or a sample of them if they do not fit. unigram needs about 20 times the size of the text, so set
--sample-bytes for a large corpus. At the end, a table shows the number of tokens of held-out documents.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line

from rich.table import Table

from megatron import files, log, object_store, tokenizer
from megatron.console import print_table
from megatron.data import preprocess
from megatron.data.preprocess.tokenizer_corpus import (
    TrainingText,
    sample,
)
from megatron.errors import DataError, exit_code
from megatron.tokenizer import fertility, train

MAX_SHOWN_INPUTS = 20
MAX_SHOWN_BAD_LINES = 20
INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C, as in shells."""
SCRIPTS_WITHOUT_SPACES = ("Han", "Kana")


def integer_at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of integers, which may be written as 1e9, that rejects values below ``minimum``."""

    def parse(text: str) -> int:
        try:
            value = float(text)
        except ValueError:
            value = minimum - 1
        if not (value >= minimum and value.is_integer()):
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text!r}")
        return int(text) if text.isdecimal() else int(value)

    return parse


def held_out_share(text: str) -> float:
    """Parse a share of at least 0 and less than 0.5."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 0.5:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to less than 0.5, got {text!r}")
    return value


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
        required=True,
        help="files and folders, also s3://..., in this order; - for standard input",
    )
    add("--output", type=Path, required=True, help="file to write: .model for unigram, otherwise .json")
    add("--vocab-size", type=integer_at_least(1), required=True, help="number of tokens, including control tokens")
    add("--model", choices=tuple(train.MODELS), default="bpe")
    add("--format", choices=preprocess.FORMATS, help="format of all inputs (default: by file name)")
    add("--json-key", nargs="+", default=["text"], help="key of the text, a.b for a nested one; several are joined")
    add("--sample-bytes", type=integer_at_least(1), help="bytes of text to train on, sampled evenly (default: all)")
    add(
        "--memory-bytes",
        type=integer_at_least(1 << 24),
        help="memory for the words of the text (bpe, wordpiece), 16777216 or more; those that do not fit are sampled "
        "(default: half of the free memory, at most the largest of 2.7 times the text, 10 kB per token and 80 MB)",
    )
    add("--special-tokens", nargs="+", default=[], metavar="NAME", help="more control tokens, such as <fim_prefix>")
    add(
        "--num-sentinels",
        type=integer_at_least(0),
        default=0,
        help="number of T5 sentinels <extra_id_0> ... (default: 0)",
    )
    add("--max-bad-lines", type=integer_at_least(0), help="maximum number of bad lines to skip (default: 0)")
    add("--max-bad-fraction", type=fraction, help="maximum fraction of bad lines to skip")
    add(
        "--max-token-length",
        type=integer_at_least(2),
        help="maximum length of a token in UTF-8 bytes (bpe; a Chinese character takes 3) or in characters (unigram). "
        "Without a limit, a Chinese clause may become a single token (default: no limit; unigram 16)",
    )
    add(
        "--held-out",
        type=held_out_share,
        default=0.01,
        help="fraction of the text held out for measurement (default: 0.01)",
    )
    return parser.parse_args(argv)


def training_text(args: argparse.Namespace) -> TrainingText:
    """Return the stream of documents, grouped by input if there are 2 to ``MAX_SHOWN_INPUTS`` inputs."""
    inputs = {str(file): str(path) for path in args.input for file in preprocess.find_inputs([path])}
    is_by_input = 1 < len(args.input) <= MAX_SHOWN_INPUTS
    documents = sample(args.input, args.format, args.json_key, args.sample_bytes)
    return TrainingText(
        documents,
        lambda path: inputs[path] if is_by_input else "",
        args.held_out,
        max_bad_lines=args.max_bad_lines,
        max_bad_fraction=args.max_bad_fraction,
    )


def group_by_language(held_out: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return group -> held-out documents; if there is a single unnamed group, it is divided by language."""
    if set(held_out) != {""}:
        return {name: list(texts) for name, texts in held_out.items()}
    groups: dict[str, list[str]] = {}
    for text in held_out[""]:
        groups.setdefault(fertility.language_of(text), []).append(text)
    return dict(sorted(groups.items(), key=lambda group: -sum(map(len, group[1]))))


def report(rows: Sequence[fertility.Fertility]) -> None:
    """Print a table of the tokens that a text needs."""
    table = Table(title="held-out documents")
    for name in ("text", "documents", "MB", "bytes/token", "tokens/character", "tokens/word", "unknown"):
        table.add_column(name, justify="left" if name == "text" else "right", overflow="fold")
    for row in rows:
        words = "-" if row.name in SCRIPTS_WITHOUT_SPACES else f"{row.tokens_per_word:.3f}"
        table.add_row(
            row.name,
            f"{row.num_documents}",
            f"{row.num_bytes / 1e6:.2f}",
            f"{row.bytes_per_token:.2f}",
            f"{row.tokens_per_char:.3f}",
            words,
            f"{row.unknown_rate:.3%}",
        )
    print_table(table)


def check_output(output: Path, model: str) -> None:
    """Raise DataError if ``output`` does not have the suffix for ``model``, or cannot be written."""
    suffix = ".model" if model == "unigram" else ".json"
    if output.suffix != suffix or output.is_dir():
        raise DataError(f"--output must be a {suffix} file with --model {model}, got {output}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise DataError(f"--output {output} must be in a writable folder: {error}") from error


def report_bad(text: TrainingText, output: Path) -> None:
    """Write the bad lines to a file next to ``output`` if there are too many for the terminal."""
    path = output.with_suffix(".bad.jsonl")
    if len(text.bad) <= MAX_SHOWN_BAD_LINES:
        path.unlink(missing_ok=True)  # remove the file of an earlier run
        return
    files.replace_bytes(path, b"".join(json.dumps(bad.to_json()).encode() + b"\n" for bad in text.bad))
    listed = "all" if len(text.bad) == text.num_bad else f"the first {len(text.bad)}"
    log.warning(f"{text.num_bad} bad lines; {path} lists {listed} of them")


def run(args: argparse.Namespace) -> None:
    """Train, write the file, and report."""
    start_time = time.monotonic()
    check_output(args.output, args.model)
    special_tokens = train.special_names(args.special_tokens, args.num_sentinels)
    text = training_text(args)
    try:
        trained = train.MODELS[args.model](
            text, args.vocab_size, special_tokens, args.memory_bytes, args.max_token_length
        )
    finally:
        report_bad(text, args.output)
    files.replace_bytes(args.output, trained)
    vocab = tokenizer.build(tokenizer_path=args.output)
    seconds = time.monotonic() - start_time
    if len(text.bad) <= MAX_SHOWN_BAD_LINES:
        for bad in text.bad:
            log.warning(f"skipped {bad}")
    held_out = [document for group in text.held_out.values() for document in group]
    num_bytes = text.num_bytes - sum(len(document.encode()) for document in held_out)
    log.info(
        f"{args.output}: {vocab.vocab_size} tokens, trained on {text.num_documents - len(held_out)} documents, "
        f"{num_bytes / 1e6:.1f} MB in {seconds:.1f} s ({text.num_bad} bad skipped, {len(held_out)} held out)"
    )
    if vocab.vocab_size < args.vocab_size:
        log.warning(
            f"the text yields only {vocab.vocab_size} of the {args.vocab_size} tokens of --vocab-size, because nothing "
            "is left to merge. Use more text or a smaller --vocab-size."
        )
    if text.held_out:
        report(fertility.measure(vocab, group_by_language(text.held_out)))
    else:
        log.info("the text is too small for held-out documents (--held-out), so token counts are not measured")


def main() -> int:
    """Run the tool and return the exit code."""
    try:
        run(parse_args())
    except KeyboardInterrupt:
        log.error("stopped by Ctrl-C")
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Describe token files, and show samples as the model reads them.

    python tools/inspect_data.py data/corpus --picture lengths.png
    python tools/inspect_data.py data/corpus --tokenizer-path t.json --samples 3 --seq-length 1024 --eod-mask-loss
    python tools/inspect_data.py --model t5 --data-path 0.7 a 0.3 b --tokenizer-path t.json --samples 2

All other flags are training flags, with the same defaults and checks: data, tokenizer, lengths, masks, spans. The
functions of pretrain_gpt2.py or pretrain_t5.py make the samples. With several corpora, the first line of a sample names
its corpus.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from rich.console import Console

    from megatron.config import Config

SUBSETS = ("train", "valid", "test")
PATH_FLAGS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
NUM_SHOWN_LETTERS = 64


def integer_at_least(minimum: int) -> Any:
    """Return a parser of integers that rejects values below ``minimum``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text!r}")
        return int(text)

    return parse


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [PREFIX ...] [flags] [flags of the training]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=("gpt2", "t5"), default="gpt2", help="model family (default: gpt2)")
    parser.add_argument(
        "--samples", type=integer_at_least(0), default=0, metavar="N", help="samples to show (default: 0)"
    )
    parser.add_argument(
        "--first", type=integer_at_least(0), default=0, metavar="I", help="index of the first sample (default: 0)"
    )
    parser.add_argument("--subset", choices=SUBSETS, default="train", help="split to show (default: train)")
    parser.add_argument(
        "--rows", type=integer_at_least(0), default=6, metavar="N",
        help="rows of each sample's token table, and tokens around each boundary (default: 6; 0: no table)",
    )  # fmt: skip
    parser.add_argument("--top", type=integer_at_least(0), default=0, metavar="N", help="show the N most common tokens")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="write a histogram of the documents' lengths")
    return parser


def parse_args(words: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return (flags of the tool, prefixes, training flags); the words before the first flag are prefixes."""
    prefixes = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    parser = make_parser()
    flags, training_flags = parser.parse_known_args(words[len(prefixes) :])
    if flags.picture is not None and flags.picture.suffix.lower() != ".png":
        parser.error(f"--picture must end in .png, got {flags.picture}")
    path_flag = next((word for word in training_flags if word.removeprefix("--").replace("-", "_") in PATH_FLAGS), None)
    if bool(prefixes) == bool(path_flag):
        parser.error(f"set either PREFIX arguments or --data-path, got {' '.join(prefixes) or 'neither'}")
    if flags.samples and len(prefixes) > 1:
        parser.error("--samples of several corpora requires weights. Use --data-path 0.5 a 0.5 b")
    if len(prefixes) == 1:
        training_flags = ["--data-path", prefixes[0], *training_flags]
    return flags, prefixes, training_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Show the requested information; return the exit code."""
    flags, prefixes, training_flags = parse_args(sys.argv[1:] if argv is None else argv)
    from rich.console import Console

    from megatron import log
    from megatron.errors import exit_code

    try:
        report(flags, prefixes, training_flags, Console(highlight=False))
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    return 0


def report(flags: argparse.Namespace, prefixes: list[str], training_flags: list[str], console: Console) -> None:
    """Print a description of the token files, draw the picture and show samples, as far as requested."""
    from megatron import config
    from megatron.console import print_table
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.inspect import collect_stats, statistics
    from megatron.training.vocabulary import with_tokenizer

    settings = config.parse([*training_flags, "--device", "cpu"], world_size=1, family=flags.model)
    tokenizer, settings = with_tokenizer(settings)
    lengths = {}
    for prefix in prefixes or prefixes_of(settings):
        token_file = IndexedDataset(prefix)
        summary = collect_stats(token_file, tokenizer.eod_id if tokenizer is not None and tokenizer.has_eod else None)
        lengths[prefix] = summary.lengths
        print_table(statistics.stats_table(summary, tokenizer), console)
        if flags.top:
            print_table(statistics.most_frequent_table(token_file, flags.top, tokenizer), console)
    if flags.picture is not None:
        statistics.plot_lengths(lengths, flags.picture)
        console.print(f"picture {flags.picture}", soft_wrap=True)
    if flags.samples:
        show_samples(flags, settings, tokenizer, console)


def prefixes_of(settings: Config) -> list[str]:
    """Return the paths of all corpora that the training flags name, without duplicates."""
    from megatron.config.data_paths import parse_paths

    texts = [getattr(settings.data, name, None) for name in PATH_FLAGS]
    return list(dict.fromkeys(prefix for text in texts if text for _, prefix in parse_paths(text)))


def show_samples(flags: argparse.Namespace, settings: Config, tokenizer: Any, console: Console) -> None:
    """Make samples with the functions of the training script, as in a run with one process, and print them."""
    import importlib

    from megatron.data import DataLoader
    from megatron.data.inspect import view
    from megatron.data.inspect.view import TokenFormatter
    from megatron.training import global_vars, initialize
    from megatron.training.data import num_samples_of_splits

    script = importlib.import_module(f"pretrain_{flags.model}")
    world = initialize.start(settings)
    global_vars.set_current(settings, tokenizer, None)
    num_samples, split_idx = [0] * len(SUBSETS), SUBSETS.index(flags.subset)
    num_samples[split_idx] = flags.first + flags.samples
    if settings.data.has_megatron_order:  # the order depends on the length of the run
        num_samples[split_idx] = num_samples_of_splits(settings, world)[split_idx]
    samples = script.train_valid_test_datasets_provider(num_samples)[split_idx]
    tokenizer = global_vars.get_tokenizer()
    streams_of = view.t5_streams if flags.model == "t5" else view.gpt2_streams
    words = TokenFormatter(tokenizer, script.t5_tokens().names if flags.model == "t5" else None)
    for line in order_lines(samples):
        console.print(line, soft_wrap=True)
    batches = DataLoader(
        samples, micro_batch_size=1, num_micro_batches=1, data_rank=0, data_size=1, samples_consumed=flags.first
    )
    for index, batch in zip(range(flags.first, flags.first + flags.samples), batches, strict=False):
        console.rule(f"sample {index} of {flags.subset}{format_origin(samples, index)}", align="left", characters="=")
        fields = script.get_batch(batch)
        for stream in streams_of(fields, tokenizer.eod_id):
            view.print_stream(stream, words, console, flags.rows)
    initialize.stop()


def order_lines(samples: Any) -> Iterator[str]:
    """Yield lines that assign a letter to each corpus of a mixture, and the letters of the first samples."""
    names = list(getattr(samples, "parts", ()))
    if len(names) < 2:
        return
    yield from (f"{letter(corpus_idx)} = {name}" for corpus_idx, name in enumerate(names))
    num_shown = min(NUM_SHOWN_LETTERS, getattr(samples.order, "num_samples", NUM_SHOWN_LETTERS))
    letters = "".join(letter(samples.order.locate(index)[0]) for index in range(num_shown))
    yield f"corpora of the first {num_shown} samples: {letters}"


def letter(corpus_idx: int) -> str:
    """Return a letter for a corpus; "?" after z."""
    return "abcdefghijklmnopqrstuvwxyz"[corpus_idx] if corpus_idx < 26 else "?"


def format_origin(samples: Any, index: int) -> str:
    """Return ": NAME, its sample I" if samples come from several corpora."""
    names = list(getattr(samples, "parts", ()))
    if len(names) < 2:
        return ""
    corpus, sample_idx = samples.order.locate(index)
    return f": {names[corpus]}, its sample {sample_idx}"


if __name__ == "__main__":
    sys.exit(main())

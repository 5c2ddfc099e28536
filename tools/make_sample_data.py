"""Make the sample data: small stories in English and Chinese, without a network.

    python tools/make_sample_data.py

writes stories (tools/sample_stories.py), trains a vocabulary on them, and makes data/sample/{corpus.jsonl,
tokenizer.json, gpt2_text_document.bin, .idx, .meta.json}: 10,000 stories, 4.6 MB, in a few seconds. Quick when all is
up to date; safe to run several times at once.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import orjson  # noqa: E402
import tokenizers  # noqa: E402

from megatron import files, log, tokenizer  # noqa: E402
from megatron.data import preprocess  # noqa: E402
from megatron.data.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.errors import DataError, exit_code  # noqa: E402
from megatron.tokenizer import train  # noqa: E402
from tools import sample_stories  # noqa: E402

RECIPE = "2"
"""Raise it when the way the data is made changes: older data is then made anew."""

PREFIX = "gpt2_text_document"
CHINESE_WORDS = re.compile("|".join(sorted(sample_stories.chinese_words(), key=len, reverse=True)))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the tool's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "data" / "sample", help="folder (default: data/sample)")
    parser.add_argument("--number", type=int, default=10_000, help="stories (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="of the stories (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=2400)
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="processes that encode")
    args = parser.parse_args(argv)
    if args.number < 1:
        parser.error(f"--number must be at least 1, got {args.number}")
    return args


def key_of(documents: list[str], vocab_size: int) -> str:
    """Return a text that changes when the documents or the way they are processed do."""
    digest = hashlib.sha256(f"{RECIPE}:{vocab_size}:{tokenizers.__version__}".encode())
    for text in documents:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def with_words_apart(text: str) -> str:
    """Return ``text`` for the training of a vocabulary, where a Chinese name or thing is a word as an English one is.

    Chinese has no blanks: merges would run over the edges of a name, which would then have other tokens each time.
    """
    return CHINESE_WORDS.sub(r"\n\g<0>\n", text)


def is_up_to_date(output: Path, key: str) -> bool:
    """Return whether ``output`` holds the data of ``key``, whole."""
    try:
        sidecar = IndexedDataset(output / PREFIX).sidecar
        identity = tokenizer.build(tokenizer_path=output / "tokenizer.json").identity
        return (output / "key").read_text() == key and sidecar is not None and sidecar.tokenizer == identity
    except (OSError, DataError):
        return False


def make(output: Path, documents: list[str], key: str, vocab_size: int, num_workers: int) -> None:
    """Write everything; the key comes last."""
    (output / "key").unlink(missing_ok=True)
    corpus, vocabulary = output / "corpus.jsonl", output / "tokenizer.json"
    files.replace_bytes(corpus, b"".join(orjson.dumps({"text": text}) + b"\n" for text in documents))
    log.info(
        f"training a vocabulary of {vocab_size} on {len(documents)} documents, {corpus.stat().st_size / 1e6:.1f} MB"
    )
    files.replace_bytes(vocabulary, train.train_bpe(map(with_words_apart, documents), vocab_size))
    job = preprocess.Job(
        inputs=[corpus],
        output_prefix=str(output / PREFIX),
        make_tokenizer=functools.partial(tokenizer.build, tokenizer_path=vocabulary),
        num_workers=num_workers,
    )
    summary = preprocess.run(job)
    files.replace_bytes(output / "key", key.encode())
    log.info(f"{output}: {summary.num_documents} documents, {summary.num_tokens} tokens")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time work in ``folder``; the lock ends with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info(f"waiting for another process that makes {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(argv: list[str] | None = None) -> int:
    """Make what is not up to date; return the exit code."""
    args = parse_args(argv)
    try:
        documents = list(sample_stories.stories(args.number, args.seed))
        key = key_of(documents, args.vocab_size)
        with locked(args.output):
            if is_up_to_date(args.output, key):
                log.info(f"{args.output} is up to date")
            else:
                make(args.output, documents, key, args.vocab_size, args.workers)
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

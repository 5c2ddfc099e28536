"""Make the sample data: real text that is on every machine.

    python tools/make_sample_data.py

gathers the repository's own texts (examples/corpus) and the sources of the standard library of the running Python, each
module a document, trains a vocabulary on them, and writes data/sample/{corpus.jsonl, tokenizer.json,
gpt2_text_document.bin, .idx, .meta.json}. Quick when all is up to date; safe to run several times at once.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import sys
import sysconfig
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

RECIPE = "1"
"""Raise it when the way the data is made changes: older data is then made anew."""

LEFT_OUT = {"test", "tests", "idlelib", "encodings", "site-packages", "dist-packages", "lib2to3", "turtledemo"}
LEFT_OUT |= {"ensurepip", "pydoc_data", "__pycache__"}
PREFIX = "gpt2_text_document"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the tool's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "data" / "sample", help="folder (default: data/sample)")
    parser.add_argument("--corpus", type=Path, default=ROOT / "examples" / "corpus", help="folder of own texts")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of modules")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="processes that encode")
    return parser.parse_args(argv)


def gather(corpus: Path, library: Path) -> list[str]:
    """Return all documents, own texts spread evenly among the modules, so that every split sees both.

    Raises:
        DataError: there are no own texts.
    """
    own = _documents(corpus, "*.txt")
    modules = _documents(library, "*.py")
    if not own:
        raise DataError(f"{corpus} must hold the repository's own texts (*.txt), found none; is the checkout complete?")
    placed = [((place + 0.5) / len(texts), text) for texts in (own, modules) for place, text in enumerate(texts)]
    return [text for _, text in sorted(placed, key=lambda item: item[0])]


def _documents(folder: Path, pattern: str) -> list[str]:
    """Return the texts of a folder, in an order that mixes its subfolders and is the same on every machine."""
    paths = [path for path in folder.rglob(pattern) if LEFT_OUT.isdisjoint(path.relative_to(folder).parts)]
    paths.sort(key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())
    texts = (path.read_bytes().decode("utf-8", "ignore").replace("\x00", "") for path in paths)
    return [text for text in texts if text.strip()]


def key_of(documents: list[str], vocab_size: int) -> str:
    """Return a text that changes when the documents or the way they are processed do."""
    digest = hashlib.sha256(f"{RECIPE}:{vocab_size}:{tokenizers.__version__}".encode())
    for text in documents:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


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
    files.replace_bytes(vocabulary, train.train_bpe(documents, vocab_size))
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
        documents = gather(args.corpus, args.library)
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

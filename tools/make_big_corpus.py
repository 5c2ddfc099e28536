"""Make a corpus of any size for benchmarks: JSON lines, documents of mixed length, English, Chinese and code.

    python tools/make_big_corpus.py --bytes 2e9 --output data/big.jsonl

Sentences of examples/corpus and lines of this checkout's Python files are combined at random, with invented names and
numbers among them, so that the vocabulary keeps growing. The same checkout, seed and size give the same bytes. The
corpus is not meant for training.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line

import orjson  # noqa: E402

from megatron import files, log  # noqa: E402
from megatron.errors import DataError, exit_code  # noqa: E402

MEDIAN_BYTES = 1500
LENGTH_SIGMA = 1.2
MAX_BYTES = 1 << 20
CHUNK_BYTES = 1 << 22
NUM_NAMES = 1 << 15
NUM_LENGTHS = 1 << 12
SYLLABLES = "ba den fi gor hal ist jun ka lem mor nu os per qui ras tol um ven wex yar zo chi thra sel".split()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=float, required=True, help="minimum size of the file")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not 1 <= args.bytes < 1e15:
        parser.error(f"--bytes must be from 1 to 1e15, got {args.bytes:g}")
    return args


def escape_json(text: str) -> bytes:
    """Return ``text`` escaped for a JSON string."""
    return orjson.dumps(text)[1:-1]


def load_snippets(root: Path) -> list[list[bytes]]:
    """Return the texts from which documents are made, escaped for JSON: English and Chinese sentences, blocks of code.

    Raises:
        DataError: the texts are missing.
    """
    english, chinese, code = (
        [path.read_text(encoding="utf-8") for path in sorted(root.glob(pattern))]
        for pattern in ("examples/corpus/en/*.txt", "examples/corpus/zh/*.txt", "megatron/**/*.py")
    )
    if not (english and chinese and code):
        raise DataError(f"{root} must contain examples/corpus/{{en,zh}}/*.txt and megatron/. Use a complete checkout")
    snippets_by_type = [
        [sentence + " " for text in english for sentence in re.split(r"(?<=[.!?])\s+", text)],
        [sentence for text in chinese for sentence in re.split(r"(?<=[。！？])", text)],
        ["\n".join(text.splitlines()[start : start + 4]) + "\n" for text in code for start in range(0, 80, 4)],
    ]
    return [
        [escape_json(snippet) for snippet in type_snippets if snippet.strip()] for type_snippets in snippets_by_type
    ]


def make_names(draw: Callable[[], float]) -> list[bytes]:
    """Return invented words and numbers."""
    words = []
    for i in range(NUM_NAMES):
        word = "".join(SYLLABLES[int(draw() * len(SYLLABLES))] for _ in range(2 + i % 3))
        words.append(f"{word.title()} " if i % 4 else f"{int(draw() * 1e5)} ")
    return [escape_json(name) for name in words]


def draw_lengths(draw: Callable[[], float]) -> list[int]:
    """Return document lengths in bytes, drawn from a log-normal distribution: most are short, some very long."""
    normal = (math.sqrt(-2 * math.log(1 - draw())) * math.cos(2 * math.pi * draw()) for _ in range(NUM_LENGTHS))
    return [int(min(MEDIAN_BYTES * math.exp(LENGTH_SIGMA * value), MAX_BYTES)) + 1 for value in normal]


def documents(snippets_by_type: Sequence[Sequence[bytes]], seed: int) -> Iterator[bytes]:
    """Yield JSON lines endlessly.

    Random choices use only ``random()``, because its sequence is the same in all Python versions.

    Args:
        snippets_by_type: text snippets for each type of document, as returned by ``load_snippets``.
    """
    draw = random.Random(seed).random
    invented, document_lengths = make_names(draw), draw_lengths(draw)
    document_id = 0
    while True:
        type_snippets = snippets_by_type[int(draw() * len(snippets_by_type))]
        line_parts = [b'{"id": %d, "text": "' % document_id]
        remaining = document_lengths[int(draw() * NUM_LENGTHS)]
        while remaining > 0:
            start = int(draw() * len(type_snippets))
            sentences = type_snippets[start : start + min(remaining // 80 + 1, 8)]
            line_parts += sentences
            line_parts.append(invented[int(draw() * NUM_NAMES)])
            remaining -= sum(map(len, sentences))
        line_parts.append(b'"}\n')
        yield b"".join(line_parts)
        document_id += 1


def group_lines(lines: Iterator[bytes], num_bytes: float) -> Iterator[bytes]:
    """Group lines into blocks for writing, and stop once their total size is at least ``num_bytes``."""
    lines_in_block: list[bytes] = []
    size = written = 0
    while written + size < num_bytes:
        line = next(lines)
        lines_in_block.append(line)
        size += len(line)
        if size >= CHUNK_BYTES:
            yield b"".join(lines_in_block)
            written += size
            lines_in_block, size = [], 0
    yield b"".join(lines_in_block)


def main(argv: list[str] | None = None) -> int:
    """Write a temporary file next to the output, then rename it; return the exit code."""
    args = parse_args(argv)
    start_time = time.monotonic()
    temporary = args.output.with_name(f".{args.output.name}.tmp")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        size, crc = files.write_chunks(temporary, group_lines(documents(load_snippets(ROOT), args.seed), args.bytes))
        files.rename(temporary, args.output)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        log.error(f"error: {error}")
        return exit_code(error)
    seconds = time.monotonic() - start_time
    log.info(f"{args.output}: {size} bytes, crc32 {crc:08x}, {size / 1e6 / seconds:.0f} MB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

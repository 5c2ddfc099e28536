"""Train a vocabulary of one's own on text.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer.json

--model bpe (byte-level, a `tokenizers` JSON file) or unigram (a SentencePiece .model); both get <|endoftext|>.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import files, log, tokenizer  # noqa: E402
from megatron.data import preprocess  # noqa: E402
from megatron.errors import DataError, exit_code  # noqa: E402
from megatron.tokenizer import train  # noqa: E402


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the tool's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", type=Path, required=True, help="text files, in this order")
    parser.add_argument(
        "--output", type=Path, required=True, help="the file to write: .json for bpe, .model for unigram"
    )
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--model", choices=("bpe", "unigram"), default="bpe")
    parser.add_argument(
        "--format", choices=preprocess.FORMATS, help="default: by name; .jsonl, else a document per file"
    )
    parser.add_argument("--json-key", default="text", help="key of the text in JSON lines (default: text)")
    return parser.parse_args(argv)


def texts(args: argparse.Namespace) -> Iterator[str]:
    """Yield the documents; a bad line ends the tool."""
    for text in preprocess.texts(args.input, args.format, [args.json_key]):
        if isinstance(text, preprocess.BadRecord):
            raise DataError(str(text))
        yield text


def main() -> int:
    """Train and write the file; return the exit code."""
    args = parse_args()
    started = time.monotonic()
    try:
        documents = list(texts(args))
        if not documents:
            raise DataError(f"no documents in {', '.join(map(str, args.input))}")
        trained = (train.train_bpe if args.model == "bpe" else train.train_unigram)(documents, args.vocab_size)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        files.replace_bytes(args.output, trained)
        vocab_size = tokenizer.build(tokenizer_path=args.output).vocab_size
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    seconds = time.monotonic() - started
    log.info(f"{args.output}: {vocab_size} tokens, trained on {len(documents)} documents in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

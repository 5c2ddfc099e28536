"""Report which steps and ranks of a run read a document, or what a step read, from the order of the samples.

    python tools/audit.py runs/gpt2-20260101-120000 --document 17
    python tools/audit.py runs/gpt2-20260101-120000 --document 17 --corpus data/web
    python tools/audit.py runs/gpt2-20260101-120000 --text "a sentence of the document"
    python tools/audit.py runs/gpt2-20260101-120000 --step 120 --positions

The order is computed from config.json, sample_history.jsonl and the newest checkpoint in the folder. The run's token
files are needed, its logs are not. Losses of documents are printed if the run recorded them (--log-document-losses).
Documents are counted from 0, as in --exclude. Decoders only.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from rich.console import Console

    from megatron.training.audit import Audit, Reading
    from megatron.training.document_losses import DocumentLoss


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the tool's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument("--document", type=int, metavar="N", help="steps and ranks that read document N")
    question.add_argument("--text", help="steps and ranks that read the documents that contain this text")
    question.add_argument("--step", type=int, metavar="K", help="samples, documents and ranks of step K, from 1")
    parser.add_argument(
        "--corpus",
        help="corpus of --document or --text, as in --data-path (default: the run's only corpus; with --text, all)",
    )
    parser.add_argument(
        "--until", type=int, metavar="K", help="last step to consider (default: the run's last recorded step)"
    )
    parser.add_argument(
        "--positions", action="store_true", help="also list the tokens of each rank, with context parallelism"
    )
    flags = parser.parse_args(argv)
    if flags.text is not None and not flags.text.strip():
        parser.error(f"--text must be a text of the document, got {flags.text!r}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer to the question that the flags ask; return the exit code."""
    flags = parse_args(argv)
    from rich.console import Console

    from megatron import log
    from megatron.errors import exit_code
    from megatron.training.audit import Audit

    console = Console(highlight=False, soft_wrap=True)
    try:
        audit = Audit(flags.run)
        lines = step_lines(audit, flags) if flags.step is not None else document_lines(audit, flags, console)
        for line in lines:
            console.print(line, markup=False)
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    return 0


def document_lines(audit: Audit, flags: argparse.Namespace, console: Console) -> Iterator[str]:
    """Yield lines about the steps that read the requested documents."""
    corpora = [audit.corpus_idx(flags.corpus)] if flags.corpus or flags.document is not None else audit.all_corpora
    for corpus_idx in corpora:
        documents = [flags.document] if flags.text is None else audit.documents_with(flags.text, corpus_idx)
        for document in documents:
            readings = list(audit.readings_of(corpus_idx, document, flags.until))
            yield (
                f"document {document} of {audit.corpus_name(corpus_idx)}, {audit.num_tokens(corpus_idx, document)} "
                f"tokens: {format_effects(readings)} up to step {audit.last_step(flags.until)}"
            )
            losses = audit.losses_of_document(corpus_idx, document)
            for reading in readings:
                loss = audit.step_losses.get(reading.step)
                loss_text = "" if loss is None else f", step loss {loss:.4f}"
                yield (
                    f"  {format_reading(reading)}{loss_text}{format_loss(losses.get(reading.step))}"
                    f"{format_effect(reading)}"
                )
                if flags.positions:
                    yield from chunk_lines(reading)
        if flags.text is not None and not documents:
            yield f"no document of {audit.corpus_name(corpus_idx)} contains the text"


def step_lines(audit: Audit, flags: argparse.Namespace) -> Iterator[str]:
    """Yield lines about the samples of one step."""
    losses = audit.losses_of_step(flags.step)
    if flags.step > audit.last_step():
        yield f"step {flags.step} is not recorded yet, the last step is {audit.last_step()}; it will read:"
    elif audit.is_skipped(flags.step):
        yield f"step {flags.step} was skipped by --iterations-to-skip; it read none of these samples:"
    for sample, readings in audit.samples_of_step(flags.step):
        first = readings[0]
        yield f"step {flags.step}, sample {sample}: replica {first.reader.replica}, {format_ranks(first.reader.ranks)}"
        for reading in readings:
            yield (
                f"  {reading.corpus} document {reading.document}, tokens {reading.offset}-"
                f"{reading.offset + reading.length - 1}, at position {reading.position} of the sample"
                f"{format_loss(losses.get((reading.corpus, reading.document)))}{format_effect(reading)}"
            )
        if flags.positions:
            yield from chunk_lines(first)


def format_reading(reading: Reading) -> str:
    """Format the step, sample, tokens and ranks of one reading."""
    return (
        f"step {reading.step}, sample {reading.sample}: tokens {reading.offset}-{reading.offset + reading.length - 1} "
        f"of the document, at position {reading.position} of the sample, replica {reading.reader.replica}, "
        f"micro-batch {reading.reader.micro_batch}, {format_ranks(reading.reader.ranks)}"
    )


def format_effects(readings: Sequence[Reading]) -> str:
    """Format as "read in 3 samples, skipped in 1, excluded in 2"."""
    counts = Counter(reading.effect for reading in readings)
    others = "".join(f", {effect} in {counts[effect]}" for effect in ("skipped", "excluded") if counts[effect])
    return f"read in {counts['read']} samples{others}"


def format_effect(reading: Reading) -> str:
    """Format why the tokens were not trained on; return "" if they were."""
    texts = {
        "read": "",
        "skipped": ", not read: the step was skipped (--iterations-to-skip)",
        "excluded": ", no loss: the document was excluded (--exclude)",
    }
    return texts[reading.effect]


def format_loss(loss: DocumentLoss | None) -> str:
    """Format the loss of a document in a step; return "" if it is not recorded."""
    return "" if loss is None else f", document loss {loss.loss:.4f} over {loss.tokens} tokens in the step"


def chunk_lines(reading: Reading) -> Iterator[str]:
    """Yield the tokens of the sample on each rank, if the sequence is sharded."""
    for rank, chunks in reading.reader.chunks.items():
        yield f"    rank {rank}: inputs {', '.join(f'{start}-{stop - 1}' for start, stop in chunks)} of the sample"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format as "rank 3" or "ranks 0, 1, 4, 5"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


if __name__ == "__main__":
    sys.exit(main())

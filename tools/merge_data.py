"""Join token files into one pair of files, byte-identical to preprocessing their texts together.

    python tools/merge_data.py --input data/a data/b data/c --output-prefix data/all

    python tools/merge_data.py --input data/corpus.parts --output-prefix data/corpus

The second command joins the output of tools/preprocess_data.py jobs with --part K/N. The result is byte-identical to
that of a single job, and all parts must be present. The folder of parts is not removed.

Inputs must have the same token type and vocabulary. Token files of Megatron-LM, which have no .meta.json, can be
joined, too; the output then has no .meta.json. Memory use does not depend on the size of the files. The output files
appear only when they are complete.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line

import numpy as np

from megatron import log, object_store
from megatron.data import preprocess, token_upload
from megatron.data.dataset_metadata import DatasetMetadata
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.errors import DataError, exit_code
from megatron.tokenizer import probe
from megatron.tokenizer.identity import is_same

BLOCK_SIZE = 1 << 20
INTERRUPTED_EXIT_CODE = 130
UNKNOWN_IDENTITY = "not named"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="paths without .bin and .idx, in this order; or a single folder of parts, PREFIX.parts",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="OUT", help="path of the output without .bin/.idx, also s3://..."
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("data"),
        help="local folder for the output before it is uploaded to an object store (default: data)",
    )
    return parser.parse_args(argv)


def join_parts(inputs: Sequence[str], output_prefix: str) -> str:
    """Join the folder of parts, the only entry of ``inputs``; return the counts as text.

    Raises:
        DataError: there are several inputs, or a part is missing, incomplete or of another job.
    """
    if len(inputs) > 1:
        raise DataError(
            f"--input must be a single folder of parts, got {' '.join(inputs)}. Join each folder separately first."
        )
    summary = preprocess.join(Path(inputs[0]), output_prefix)
    if summary.bad_path:
        bad_lines = "1 bad line was" if summary.num_bad == 1 else f"{summary.num_bad} bad lines were"
        log.warning(f"{bad_lines} skipped; {summary.bad_path} lists {'it' if summary.num_bad == 1 else 'them'}")
    return f"{summary.num_documents} documents, {summary.num_tokens} tokens of {summary.num_units} units"


def merge(inputs: Sequence[str], output_prefix: str) -> IndexedDatasetBuilder:
    """Write the documents of ``inputs`` one after another; return the writer with the counts.

    Raises:
        DataError: an input cannot be read, differs from the first in token type or vocabulary, or is the output.
    """
    datasets = [IndexedDataset(prefix) for prefix in inputs]
    check_output(datasets, output_prefix)
    check_compatible(datasets)
    common = common_sidecar(datasets)
    writer = IndexedDatasetBuilder(
        output_prefix,
        vocab_size=common.vocab_size if common else None,
        tokenizer=common.tokenizer if common else "",
        eod_id=common_eod(datasets),
        probe=common.probe if common else None,
        dtype=datasets[0].dtype,
    )
    with writer:
        for dataset in datasets:
            writer.append(
                dataset.token_path,
                iterate_blocks(dataset.document_lengths),
                num_tokens=dataset.num_tokens,
                max_token_id=dataset.sidecar.max_token_id if dataset.sidecar else 0,
                crc32=dataset.sidecar.bin_crc32 if dataset.sidecar else None,
            )
    return writer


def check_output(datasets: Sequence[IndexedDataset], output_prefix: str) -> None:
    """Raise DataError if an output file is an input file, possibly under another path."""
    for dataset in datasets:
        pairs = [(dataset.token_path, Path(output_prefix + ".bin")), (dataset.index_path, Path(output_prefix + ".idx"))]
        if any(output_path.exists() and output_path.samefile(path) for path, output_path in pairs):
            raise DataError(f"--output-prefix must differ from every --input, got {output_prefix}. Use another name.")


def check_compatible(datasets: Sequence[IndexedDataset]) -> None:
    """Raise DataError unless all inputs have the same token type and, where sidecars record it, the same vocabulary."""
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DataError(
                f"all inputs must have the same token type, got {first.dtype} in {first.prefix} and {dataset.dtype} in "
                f"{dataset.prefix}. Preprocess one of them again with the tokenizer of the other."
            )
    sidecars = [(dataset.prefix, dataset.sidecar) for dataset in datasets if dataset.sidecar]
    for prefix, sidecar in sidecars[1:]:
        if not has_same_vocabulary(sidecar, sidecars[0][1]):
            raise DataError(
                f"all inputs must have the same vocabulary, got {describe_vocabulary(sidecars[0][1])} in "
                f"{sidecars[0][0]} and {describe_vocabulary(sidecar)} in {prefix}. Preprocess one of them again with "
                "the tokenizer of the other."
            )
        if text := probe.difference(sidecars[0][1].probe, sidecar.probe):
            raise DataError(
                f"{sidecars[0][0]} and {prefix} have the same vocabulary, but {text}. Preprocess one of them again "
                "with the library of the other."
            )


def has_same_vocabulary(first: DatasetMetadata, second: DatasetMetadata) -> bool:
    """Return True if both sidecars record the same tokenizer and vocabulary size."""
    if first.vocab_size != second.vocab_size:
        return False
    if not (first.tokenizer and second.tokenizer):
        return first.tokenizer == second.tokenizer
    return is_same(first.tokenizer, second.tokenizer)


def describe_vocabulary(sidecar: DatasetMetadata) -> str:
    """Return a description of the vocabulary."""
    return f"identity {sidecar.tokenizer or UNKNOWN_IDENTITY} of {sidecar.vocab_size} ids"


def common_sidecar(datasets: Sequence[IndexedDataset]) -> DatasetMetadata | None:
    """Return the sidecar of the first input; None if an input has none, because its contents are then unknown."""
    prefix_without_sidecar = next((dataset.prefix for dataset in datasets if dataset.sidecar is None), None)
    if prefix_without_sidecar is not None:
        log.warning(
            f"{prefix_without_sidecar} has no .meta.json, so the output has none, and its vocabulary was not checked"
        )
        return None
    return datasets[0].sidecar


def common_eod(datasets: Sequence[IndexedDataset]) -> int | None:
    """Return the id that ends every document of all parts; None if there is no such id.

    Raises:
        DataError: documents of two parts end with different tokens.
    """
    ends = {dataset.sidecar.eod_id if dataset.sidecar and dataset.sidecar.has_eod else None for dataset in datasets}
    prefix_of_id = {
        dataset.sidecar.eod_id: dataset.prefix for dataset in datasets if dataset.sidecar and dataset.sidecar.has_eod
    }
    if len(prefix_of_id) > 1:
        listed = " and ".join(f"the id {eod_id} in {prefix}" for eod_id, prefix in prefix_of_id.items())
        raise DataError(
            f"documents of all inputs must end with the same token, got {listed}. Preprocess one of them again with "
            "--eod-token"
        )
    if len(ends) > 1 and all(dataset.sidecar for dataset in datasets):
        log.warning("only some inputs end their documents with an end-of-document token, so the output records none")
    return ends.pop() if len(ends) == 1 else None


def iterate_blocks(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Copy ``lengths`` block by block, because the array of a large file is memory-mapped."""
    for start in range(0, len(lengths), BLOCK_SIZE):
        yield np.array(lengths[start : start + BLOCK_SIZE])


def merge_into(inputs: Sequence[str], output_prefix: str, work_dir: Path) -> str:
    """Join token files, or a folder of parts, and return the counts as text.

    The output is uploaded if ``output_prefix`` is in an object store; ``work_dir`` then contains the local files.
    """
    if remote_input := next(filter(object_store.is_remote, inputs), None):
        raise DataError(
            f"--input must be on this machine, got {remote_input}. Copy its .bin, .idx and .meta.json files."
        )
    is_remote = object_store.is_remote(output_prefix)
    local_prefix = token_upload.local_prefix(output_prefix, work_dir) if is_remote else output_prefix
    if is_remote:
        token_upload.check_target(output_prefix)
    if any(Path(path).is_dir() for path in inputs):
        counts = join_parts(inputs, local_prefix)
    else:
        writer = merge(inputs, local_prefix)
        counts = f"{writer.num_documents} documents, {writer.num_tokens} tokens of {len(inputs)} inputs"
    if is_remote:
        token_upload.upload(local_prefix, output_prefix)
    return counts


def main(argv: list[str] | None = None) -> int:
    """Join the files; return the exit code."""
    args = parse_args(argv)
    try:
        counts = merge_into(args.input, args.output_prefix, args.work_dir)
    except KeyboardInterrupt:
        log.error("stopped")
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    log.info(f"{args.output_prefix}.bin: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

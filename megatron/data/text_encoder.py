"""The process that encodes a text corpus in the background: ``python -m megatron.data.text_encoder JSON``."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import uuid
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from megatron import files, log, tokenizer
from megatron.child_process import die_with_parent
from megatron.data import preprocess
from megatron.data.preprocess.plan import read_plan
from megatron.data.preprocess.shards import shard_folder_path
from megatron.data.text_corpus import EncoderArguments
from megatron.errors import exit_code
from megatron.tokenizer.build import supports_gigatoken

_PIPE_BYTES = 1 << 16
"""Capacity of a pipe, up to which a write does not wait for the reader."""
_NICENESS = 10
"""The encoder runs next to training; ranks on CPUs have precedence."""


def encode(arguments: EncoderArguments) -> preprocess.Summary:
    """Encode the corpus, continuing with the finished units of an interrupted process.

    Raises:
        DataError, UnitError: see ``preprocess.run``.
    """
    build = functools.partial(tokenizer.build, **arguments.tokenizer)
    shard_folder = shard_folder_path(arguments.prefix)
    earlier = read_plan(shard_folder)
    if earlier is not None and "--gigatoken" in earlier.options:
        use_gigatoken = bool(earlier.options["--gigatoken"])
    else:
        use_gigatoken = all(map(find_spec, ("gigatoken", "awkward"))) and supports_gigatoken(build())
    job = preprocess.Job(
        inputs=[arguments.path],
        output_prefix=arguments.prefix,
        make_tokenizer=build,
        json_keys=arguments.json_keys,
        max_bad_lines=arguments.max_bad_lines,
        num_workers=arguments.num_workers,
        use_gigatoken=use_gigatoken,
        resume=shard_folder.exists(),
        reports_all_bad=True,
        source=arguments.source,
    )
    return preprocess.run(job)


def training_message(error: Exception, arguments: EncoderArguments) -> str:
    """Rewrite an error of the preprocessing job with the flags of a training run."""
    message = str(error)
    for text, replacement in (
        ("--resume continues with them", "the next start of the run continues with them"),
        ("use another --output-prefix", "set --data-cache-path to another folder"),
        (f"--output-prefix {arguments.prefix}", arguments.prefix),
        ("--input", "--data-path"),
        ("reduce --workers", "encode the corpus before training with fewer --workers"),
    ):
        message = message.replace(text, replacement)
    return message if arguments.path in message else f"{arguments.path} could not be encoded: {message}"


def main() -> int:
    """Encode one corpus; write the reason of a failure to error.json, which the ranks read."""
    arguments = EncoderArguments(**json.loads(sys.argv[1]))
    die_with_parent()
    if os.getppid() != arguments.parent_pid:
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the ranks, whose end stops this process
    with suppress(OSError):
        os.nice(_NICENESS)
    error_path = Path(arguments.prefix).parent / "error.json"
    with suppress(FileNotFoundError):
        files.remove_file(error_path)
    try:
        summary = encode(arguments)
    except Exception as error:
        message = training_message(error, arguments)
        try:
            files.replace_bytes(error_path, json.dumps({"id": uuid.uuid4().hex, "message": message}).encode())
        except OSError:
            os.write(arguments.failure_descriptor, message.encode()[:_PIPE_BYTES])
        return exit_code(error)
    log.info(
        f"{arguments.path}: encoded {summary.num_documents:,} documents, {summary.num_tokens:,} tokens in "
        f"{summary.seconds:.1f} s ({summary.num_empty} empty and {summary.num_bad} bad skipped, {summary.num_resumed} "
        f"of {summary.num_units} units were finished before)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

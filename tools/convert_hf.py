"""Convert a checkpoint to a Hugging Face folder, or a Hugging Face folder to a checkpoint.

    python tools/convert_hf.py export --load runs/my-run --output my-model --dtype bf16 --verify
    python tools/convert_hf.py import --input gpt2 --output runs/from-gpt2 --verify
    python pretrain_gpt2.py --load runs/from-gpt2 --finetune ...      # with the flags that import prints

A leading `--to hf` or `--to checkpoint` means export or import. A run can also load a Hugging Face folder directly with
--load: each rank then reads its own shards, and nothing is written.

Supported are GPT-2, Llama 1 to 3, Mistral, Qwen 2, 2.5 and 3, Gemma 2 and 3 (text), OLMo 2, MPT, T5 (T5, v1.1, mT5),
BERT, and with experts Mixtral, Qwen 2 and 3 MoE and GLM-4-MoE, saved in any layout. The settings of the run determine
the model_type of an export. The weights are bitwise identical in both directions.
--verify compares the logits of a random batch in fp64 and is the only option that needs `transformers`.
Exit codes: 0, 2 (an invalid option), 3 (a checkpoint or folder that cannot be converted).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import environment, log
from megatron.errors import exit_code

DTYPES = ("fp32", "bf16", "fp16", "fp64")
MIN_SHARD_BYTES = 1000
SUBCOMMANDS = {"--to hf": "export", "--to checkpoint": "import"}


def shard_bytes(text: str) -> int:
    """Parse a number of bytes, which may be written as 5e9."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not (value >= MIN_SHARD_BYTES and value.is_integer()):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {MIN_SHARD_BYTES} bytes, got {text!r}")
    return int(value)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=raw)
    subparsers = parser.add_subparsers(dest="way", required=True)
    export_parser = subparsers.add_parser("export", allow_abbrev=False, help="a checkpoint to a Hugging Face folder")
    export_parser.add_argument(
        "--load", type=Path, required=True, help="run folder (its newest checkpoint), or a checkpoint folder"
    )
    export_parser.add_argument("--output", type=Path, required=True, help="folder to write; must be new or empty")
    export_parser.add_argument("--dtype", choices=DTYPES, help="round the weights to this type (default: as saved)")
    export_parser.add_argument(
        "--model-type",
        help="model_type in config.json if several types fit the model, such as llama and mistral without a window "
        "(default: the type of the imported folder, otherwise the first type that fits)",
    )
    export_parser.add_argument(
        "--tokenizer-path", type=Path, help="tokenizer to export (default: the checkpoint's tokenizer)"
    )
    export_parser.add_argument("--max-shard-bytes", type=shard_bytes, default=5_000_000_000, help="bytes per file")
    import_parser = subparsers.add_parser(
        "import", allow_abbrev=False, help="a Hugging Face folder to a checkpoint of step 0"
    )
    import_parser.add_argument("--input", type=Path, required=True, help="folder with config.json and safetensors")
    import_parser.add_argument("--output", type=Path, required=True, help="run folder to write; must be new or empty")
    for subparser in (export_parser, import_parser):
        subparser.add_argument("--verify", action="store_true", help="compare logits with those of `transformers`")
    return parser.parse_args(_replace_direction_flag(sys.argv[1:] if argv is None else argv))


def _replace_direction_flag(words: list[str]) -> list[str]:
    """Return ``words`` with a leading ``--to hf`` or ``--to checkpoint`` replaced by the subcommand."""
    for prefix in (words[:2], words[:1]):
        subcommand = SUBCOMMANDS.get(" ".join(prefix).replace("=", " "))
        if subcommand is not None:
            return [subcommand, *words[len(prefix) :]]
    return words


def export(args: argparse.Namespace) -> None:
    """Write the Hugging Face folder and log its contents."""
    from megatron.checkpoint.huggingface import convert
    from megatron.checkpoint.one_process import open_folder

    checkpoint = open_folder(args.load)
    summary = convert.export(
        checkpoint,
        args.output,
        dtype=args.dtype,
        model_type=args.model_type,
        tokenizer_path=args.tokenizer_path,
        max_shard_bytes=args.max_shard_bytes,
    )
    log.info(
        f"{checkpoint.path} -> {args.output}: {summary.num_tensors} tensors, {summary.num_bytes / 1e6:.1f} MB in "
        f"{len(summary.files)} file{'s' if len(summary.files) > 1 else ''}"
    )
    for note in summary.notes:
        log.warning(note)
    if args.verify:
        compare_logits(checkpoint.path, args.output, args.dtype)


def import_(args: argparse.Namespace) -> None:
    """Write the run folder and log the command that starts from it."""
    from megatron.checkpoint.huggingface.config import model_flags
    from megatron.checkpoint.huggingface.convert import import_folder
    from megatron.models.registry import FAMILIES

    path, config = import_folder(args.input, args.output)
    words = ["--load", str(args.output), "--finetune", *model_flags(config)]
    log.info(f"{args.input} -> {path}\nstart from it with: {FAMILIES[config.family].command} {shlex.join(words)}")
    if args.verify:
        compare_logits(path, args.input, None)


def compare_logits(checkpoint: Path, folder: Path, dtype: str | None) -> None:
    """Log the largest difference between the logits of both models."""
    from megatron.checkpoint.huggingface.convert import verify
    from megatron.checkpoint.one_process import open_folder

    difference = verify(open_folder(checkpoint), folder, dtype=dtype)
    log.info(f"verified: the logits of a random batch differ by at most {difference:.1e} of the largest logit")


def run(args: argparse.Namespace) -> None:
    """Convert, and compare the logits with --verify."""
    if args.verify:
        from megatron.checkpoint.huggingface.convert import require_transformers

        require_transformers()
    (export if args.way == "export" else import_)(args)


def main() -> int:
    """Run the tool and return the exit code."""
    args = parse_args()
    try:
        run(args)
    except Exception as error:
        log.error(f"error: {environment.problem(error) or error}")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Command-line options and prompt files of tools/generate.py. Does not import torch, so that errors appear at once."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron import accelerators
from megatron.arguments.argparse_parsers import RaisingParser
from megatron.errors import ConfigError, DataError

DTYPES = ("fp32", "bf16", "fp64")


def model_parser(description: str) -> RaisingParser:
    """Return a parser for a tool that loads a model; ``parse_model_args`` adds the options shared by these tools."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = RaisingParser(allow_abbrev=False, description=description, formatter_class=formatter)
    sources = "a run folder (its newest checkpoint), one checkpoint, or a Hugging Face folder"
    parser.add_argument("--load", type=Path, required=True, help=sources)
    return parser


def parse_model_args(parser: RaisingParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Add the options for loading and sharding the model, and parse ``argv``.

    Raises:
        ConfigError: an option is unknown or lacks its value.
    """
    add = parser.add_argument
    add("--tokenizer-path", type=Path, help="use this tokenizer instead of the one that the checkpoint names")
    add("--dtype", choices=DTYPES, default="fp32", help="dtype of the computation (fp32)")
    add(
        "--device", default="auto", help="device of the computation: auto, cpu, cuda, or the device of a plug-in (auto)"
    )
    add(
        "--model-parallel-size",
        type=int,
        default=1,
        metavar="T",
        help="number of ranks over which each layer is sharded (1)",
    )
    add("--pipe-parallel-size", type=int, default=1, metavar="P", help="number of pipeline stages (1)")
    try:
        return parser.parse_args(argv)
    except ValueError as error:
        raise ConfigError(f"{error} (--help lists the options)") from None


def parse_args(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the tool's options.

    Raises:
        ConfigError: options are invalid; the message lists all problems.
    """
    parser = model_parser(description)
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    add(
        "--input",
        type=Path,
        metavar="FILE",
        help="file with a prompt on each line; of FILE.jsonl, the --field of each object",
    )
    add(
        "--chat",
        action="store_true",
        help="render prompts as a user's turns with the chat template; without --prompt and --input, hold a "
        "conversation in the terminal",
    )
    add("--system", metavar="TEXT", help="with --chat: the system message")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="with --chat: use this template instead of the one of the run or its tokenizer",
    )
    add("--field", metavar="NAME", help='key of the prompt in FILE.jsonl ("text")')
    add("--output", type=Path, metavar="FILE", help="write to this file instead of standard output")
    add("--json", action="store_true", help="write JSON lines: prompt, text, tokens, num_prompt_tokens, is_ended")
    add("--max-new-tokens", type=int, metavar="N", help="maximum tokens of an answer (64, limited by the positions)")
    add("--greedy", action="store_true", help="choose the most likely token each time (the default)")
    add("--temperature", type=float, metavar="T", help="sample tokens; below 1 likely tokens are favoured (1.0)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (all)")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens that together reach P (1.0: all)")
    add("--seed", type=int, help="seed of the sampling (0)")
    add("--num-samples", type=int, metavar="N", help="different answers per prompt, with sampling (1)")
    add("--batch-size", type=int, metavar="N", help="prompts per forward pass (8)")
    add_bos_option(parser)
    add("--mode", choices=("R", "X", "S"), help="denoiser of a T5 trained with several --denoisers (first)")
    args = parse_model_args(parser, argv)
    problems = [*device_problems(args), *_input_problems(args), *_number_problems(args)]
    problems += layout_problems(args, "tools/generate.py")
    if problems:
        raise ConfigError("\n".join(problems))
    return args


def add_bos_option(parser: RaisingParser) -> None:
    """Add --add-bos-token and --no-add-bos-token."""
    add = parser.add_argument
    add(
        "--add-bos-token",
        action="store_true",
        default=None,
        help="start each prompt with the bos_token (default: as the tokenizer does; a chat template writes its own)",
    )
    add(
        "--no-add-bos-token",
        action="store_false",
        dest="add_bos_token",
        default=None,
        help="do not start prompts with the bos_token, even if the tokenizer does",
    )


def device_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield a problem if the device of ``args`` is not available."""
    try:
        accelerators.load()
    except ValueError as error:
        yield str(error)
    if problem := accelerators.problem(args.device):
        yield problem


def _input_problems(args: argparse.Namespace) -> Iterator[str]:
    if args.prompt and args.input:
        yield "prompts must be set by --prompt or by --input, got both. Leave one of them out"
    chat_flags = {"--system": args.system, "--chat-template": args.chat_template}
    for flag, value in chat_flags.items() if not args.chat else ():
        if value is not None:
            yield f"{flag} has no effect without --chat. Add --chat, or leave {flag} out"
    if args.chat and args.add_bos_token is not None:
        yield (
            f"--{'' if args.add_bos_token else 'no-'}add-bos-token cannot be used with --chat, whose template "
            "writes the bos_token. Leave one of them out"
        )
    if args.chat and args.mode is not None:
        yield "--chat needs a decoder, got --mode, which needs a T5. Leave one of them out"
    if args.field is not None and (args.input is None or args.input.suffix != ".jsonl"):
        yield f"--field needs --input FILE.jsonl, got --input {args.input}"
    if not (args.prompt or args.input):
        batch_flags = {
            "--json": args.json,
            "--output": args.output,
            "--batch-size": args.batch_size,
            "--num-samples": args.num_samples,
        }
        used_flags = [flag for flag, value in batch_flags.items() if value]
        if used_flags:
            yield f"{', '.join(used_flags)} cannot be used without --prompt or --input. Add one of them"
        if world_size() > 1 and os.environ.get("RANK", "0") == "0" and _is_stdin_null():
            yield (
                "interactive prompts need standard input, but the launcher passes none to rank 0. Add --stdin to the "
                "launcher's flags (python -m megatron.launch --stdin ...), or use --prompt or --input"
            )
    if args.output is not None and not args.output.parent.is_dir():
        yield f"the folder of --output {args.output} must exist"


def _number_problems(args: argparse.Namespace) -> Iterator[str]:
    sampling_flags = {"--temperature": args.temperature, "--top-k": args.top_k, "--top-p": args.top_p}
    used_flags = [flag for flag, value in sampling_flags.items() if value is not None]
    if args.greedy and used_flags:
        yield f"--greedy cannot be used with {', '.join(used_flags)}. Leave one of them out"
    if args.seed is not None and not used_flags:
        yield "--seed has no effect without --temperature, --top-k or --top-p. Add one of them, or leave --seed out"
    if args.num_samples not in (None, 1) and not used_flags:
        yield (
            f"--num-samples {args.num_samples} needs --temperature, --top-k or --top-p: without sampling, all answers "
            "to a prompt are equal. Add one of them, or leave --num-samples out"
        )
    counts = {
        "--max-new-tokens": args.max_new_tokens,
        "--top-k": args.top_k,
        "--batch-size": args.batch_size,
        "--num-samples": args.num_samples,
    }
    for flag, value in counts.items():
        if value is not None and value < 1:
            yield f"{flag} must be at least 1, got {value}"
    if args.temperature is not None and not 0 < args.temperature < float("inf"):
        yield f"--temperature must be a number above 0, got {args.temperature}. For 0 use --greedy"
    if args.top_p is not None and not 0 < args.top_p <= 1:
        yield f"--top-p must be above 0 and at most 1, got {args.top_p}"


def layout_problems(args: argparse.Namespace, tool: str) -> Iterator[str]:
    """Yield a problem if the layout in ``args`` does not fit the number of started ranks."""
    t, p, num_ranks = args.model_parallel_size, args.pipe_parallel_size, world_size()
    if t < 1 or p < 1:
        yield f"--model-parallel-size and --pipe-parallel-size must be at least 1, got {t} and {p}"
    elif num_ranks % (t * p):
        yield (
            f"the number of ranks must be a multiple of tensor x pipe, got {num_ranks}, --model-parallel-size {t} and "
            f"--pipe-parallel-size {p} ({t} x {p} = {t * p}). Start them with python -m megatron.launch "
            f"--nproc-per-node {t * p} {tool} ..."
        )


def world_size() -> int:
    """Return the number of started ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_stdin_null() -> bool:
    """Return True if standard input is the null device.

    The launcher connects the standard input of all ranks to the null device, except that of rank 0 with --stdin.
    """
    return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev


def read_prompts(args: argparse.Namespace) -> list[str] | None:
    """Return the prompts, each --num-samples times, or None for interactive use.

    The answers to equal prompts differ: the random numbers depend on the number of equal prompts before a prompt.

    Raises:
        DataError: the file cannot be read, or a line is not a prompt. The message names the file and the line.
    """
    if not (args.prompt or args.input):
        return None
    prompts = args.prompt or _read_input(args)
    return [prompt for prompt in prompts for _ in range(args.num_samples or 1)]


def _read_input(args: argparse.Namespace) -> list[str]:
    try:
        lines = args.input.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--input {args.input} must be UTF-8 text: {error}") from None
    lines = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    if not lines:
        raise DataError(f"--input {args.input} must have a prompt on each line, got an empty file")
    if args.input.suffix == ".jsonl":
        return [
            _read_field(line, args.field or "text", f"{args.input}:{line_number}")
            for line_number, line in enumerate(lines, 1)
        ]
    return lines


def _read_field(line: str, name: str, location: str) -> str:
    try:
        value = json.loads(line)[name]
        if isinstance(value, str):
            return value
        problem = f"{name!r} is not a string"
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise DataError(f"{location}: each line must be a JSON object with a string under {name!r} (--field): {problem}")

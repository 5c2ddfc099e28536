"""Options for tools/evaluate.py. Does not import torch, so that errors appear at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.generate.options import add_bos_option, device_problems, layout_problems, model_parser, parse_model_args


def parse_args(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the tool's options.

    Raises:
        ConfigError: options are invalid; the message lists all problems.
    """
    parser = model_parser(description)
    add = parser.add_argument
    add("--tasks", metavar="A,B", help="comma-separated tasks, groups or tags of lm_eval; * matches any text")
    add("--texts", nargs="+", metavar="[NAME=]PATH", help="perplexity of texts: FILE.txt, FILE.jsonl, or token files")
    add("--output", type=Path, metavar="FILE.json", help="also write the results to this file")
    add("--limit", type=int, metavar="N", help="evaluate the first N examples or documents of each task or text")
    add("--field", default="text", metavar="NAME", help='with --texts FILE.jsonl: key of the text ("text")')
    add("--include-path", type=Path, metavar="FOLDER", help="with --tasks: a folder with your task files (YAML)")
    add("--num-fewshot", type=int, metavar="N", help="with --tasks: solved examples per question (the task's number)")
    add("--apply-chat-template", action="store_true", help="with --tasks: render questions as a user's turns")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="with --apply-chat-template: use this template instead of the one of the run or its tokenizer",
    )
    add("--system-instruction", metavar="TEXT", help="with --apply-chat-template: the system message")
    add("--fewshot-as-multiturn", choices=("true", "false"), default="true",
        help="with --apply-chat-template: render solved examples as turns (true)")  # fmt: skip
    add("--log-samples", action="store_true", help="with --tasks and --output: also write questions and answers")
    add_bos_option(parser)
    add("--max-length", type=int, metavar="N", help="maximum input tokens of a row (--max-position-embeddings)")
    add("--max-tokens", type=int, default=16384, metavar="N",
        help="maximum tokens of a batch, including padding (16384)")  # fmt: skip
    args = parse_model_args(parser, argv)
    problems = [*device_problems(args), *_problems(args)]
    if not should_start_ranks(args):
        problems += layout_problems(args, "tools/evaluate.py")
    if problems:
        raise ConfigError("\n".join(problems))
    return args


def should_start_ranks(args: argparse.Namespace) -> bool:
    """Check if the layout needs several ranks and no launcher has started them, so that the tool must do so."""
    t, p = args.model_parallel_size, args.pipe_parallel_size
    return "WORLD_SIZE" not in os.environ and min(t, p) > 0 and t * p > 1


def _problems(args: argparse.Namespace) -> Iterator[str]:
    if not args.tasks and not args.texts:
        yield "--tasks or --texts must be set, got neither"
    task_flags = {
        "--include-path": args.include_path, "--num-fewshot": args.num_fewshot,
        "--apply-chat-template": args.apply_chat_template, "--log-samples": args.log_samples,
    }  # fmt: skip
    for flag in (flag for flag, value in task_flags.items() if value not in (None, False) and not args.tasks):
        yield f"{flag} has no effect without --tasks. Add --tasks, or leave {flag} out"
    chat_flags = {"--chat-template": args.chat_template, "--system-instruction": args.system_instruction}
    for flag in (flag for flag, value in chat_flags.items() if value is not None and not args.apply_chat_template):
        yield f"{flag} has no effect without --apply-chat-template. Add it, or leave {flag} out"
    for flag, value, minimum in (
        ("--limit", args.limit, 1), ("--num-fewshot", args.num_fewshot, 0), ("--max-length", args.max_length, 1),
        ("--max-tokens", args.max_tokens, 1),
    ):  # fmt: skip
        if value is not None and value < minimum:
            yield f"{flag} must be at least {minimum}, got {value}"
    if args.log_samples and args.output is None:
        yield "--log-samples needs --output, got none. Add --output FILE.json"
    if args.output is not None and not args.output.parent.is_dir():
        yield f"the folder of --output {args.output} must exist"

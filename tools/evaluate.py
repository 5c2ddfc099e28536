"""Evaluate a checkpoint: tasks of lm_eval, and the perplexity of texts in bits per byte.

    python tools/evaluate.py --load runs/my-run --texts data/story.txt news=news.jsonl wiki=data/wiki
    python tools/evaluate.py --load runs/my-run --tasks hellaswag,ceval-valid,cmmlu --num-fewshot 5
    python tools/evaluate.py --load runs/my-run --tasks my_task --include-path my_tasks --output results.json
    python tools/evaluate.py --load runs/my-run --tasks hellaswag --model-parallel-size 2    # starts 2 ranks
    python -m megatron.launch --nproc-per-node 4 tools/evaluate.py --model-parallel-size 2 --load runs/my-run \\
        --tasks hellaswag                                                                    # 2 replicas

--tasks needs lm_eval (pip install -e '.[eval]'); --texts does not. The checkpoint may have any layout, or be a Hugging
Face folder, and the results are the same in every layout. Ranks beyond tensor x pipe form replicas that share the work.
Exit codes: 0, 2 (an invalid option, task or text), 3 (an invalid checkpoint), 4 (another rank failed), 5 (logits that
are not finite).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.errors import ConfigError, DataError, marked
from megatron.evaluation.options import parse_args, should_start_ranks
from megatron.generate.options import world_size
from megatron.runtime.exit_guard import guard
from tools.generate import initialize_ranks

if TYPE_CHECKING:
    import torch

    from megatron.evaluation.all_ranks import DistributedModel
    from megatron.evaluation.tasks import Results
    from megatron.evaluation.texts import TextScore
    from megatron.mpu.groups import Grid
    from megatron.tokenizer.chat import ChatTemplate


ROOT = Path(__file__).resolve().parents[1]


def make_model(
    args: argparse.Namespace, grid: Grid, torch_device: torch.device
) -> tuple[DistributedModel, ChatTemplate | None]:
    """Return the model of --load, and the chat template if messages must be rendered. Collective."""
    from megatron import device
    from megatron.checkpoint.huggingface.tokenizer import vocabulary_of
    from megatron.evaluation.all_ranks import DistributedModel
    from megatron.generate import load, open_model
    from megatron.generate.text import Prompts
    from megatron.models import registry
    from megatron.tokenizer.chat import find_template

    with marked(is_of_this_rank=False), ExitStack() as stack:  # a damaged file is an error on all ranks
        checkpoint, config = open_model(args.load, stack, grid.host)
        family = registry.family_of(config.family)
        if family.model_type != "decoder":
            raise ConfigError(
                f"--tasks and --texts require a model that predicts the next token, got a {family.title} in "
                f"{checkpoint.path}. Load one of {registry.family_titles('decoder')}"
            )
        saved_probe = getattr(checkpoint, "metadata", {}).get("tokenizer_probe")
        vocabulary = vocabulary_of(config, args.tokenizer_path, saved_probe=saved_probe)
        if vocabulary is None:
            raise DataError(f"{checkpoint.path} does not specify a tokenizer. Set --tokenizer-path")
        tokenizer = vocabulary.tokenizer
        chat = None
        if args.apply_chat_template:
            chat = find_template(tokenizer, args.chat_template or config.data.chat_template)
        sharded_model = load(
            checkpoint, config, tensor=grid.tensor, pipe=grid.pipe, dtype=device.DTYPES[args.dtype], device=torch_device
        )
    model = DistributedModel(
        sharded_model,
        Prompts(tokenizer, None, adds_bos=args.add_bos_token),
        data=grid.data,
        world=grid.host,
        max_length=args.max_length or config.model.max_position_embeddings,
        max_tokens=args.max_tokens,
    )
    return model, chat


def evaluate_tasks(args: argparse.Namespace, model: DistributedModel, chat: ChatTemplate | None) -> Results:
    """Evaluate --tasks and return the results. Call it on rank 0 only, within ``model.run_from_rank_0``."""
    from megatron.evaluation.tasks import LoadedTasks, Suite, require_lm_eval

    require_lm_eval("--tasks")
    from megatron.evaluation.lm import DecoderLM

    names = tuple(name.strip() for name in args.tasks.split(",") if name.strip())
    suite = Suite(
        names,
        args.include_path,
        args.num_fewshot,
        args.limit,
        args.apply_chat_template,
        args.system_instruction,
        args.fewshot_as_multiturn == "true",
    )
    lm = DecoderLM(model, chat=chat, add_bos_token=args.add_bos_token)
    return LoadedTasks(suite).evaluate(lm, should_keep_samples=args.log_samples)


def evaluate_texts(args: argparse.Namespace, model: DistributedModel) -> list[TextScore]:
    """Return the scores of --texts, followed by their total if there are several.

    Call it on rank 0 only, within ``model.run_from_rank_0``.
    """
    from megatron.evaluation.texts import Domain, combine_scores, score_domains

    domains = [Domain.from_argument(word) for word in args.texts]
    names = [domain.name for domain in domains]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--texts must have different names, got {repeated[0]} twice. Write NAME=PATH")
    scores = score_domains(model, domains, field=args.field, limit=args.limit)
    return [*scores, combine_scores(scores)] if len(scores) > 1 else scores


def show_tasks(results: Results) -> None:
    """Print a table of the tasks and their metrics."""
    from rich.table import Table

    from megatron.console import print_table

    table = Table("task", "examples", "few-shot", "metric", "value", "±")
    for name, metrics in results.metrics.items():
        task_info = results.notes[name]
        task_cells = [task_info["alias"], task_info["num_samples"], task_info["num_fewshot"]]
        for metric, value in metrics.items():
            if "_stderr" in metric:
                continue
            error = metrics.get(_stderr_key(metric))
            cells = ["" if cell is None else str(cell) for cell in task_cells]
            table.add_row(*cells, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}")
            task_cells = [None, None, None]
    print_table(table)


def _stderr_key(metric: str) -> str:
    name, comma, suffix = metric.partition(",")
    return f"{name}_stderr{comma}{suffix}"


def show_texts(scores: list[TextScore]) -> None:
    """Print a table of the scores of all texts."""
    from rich.table import Table

    from megatron.console import print_table

    table = Table("text", "documents", "tokens", "bytes", "bytes/token", "perplexity", "bits per byte")
    for score in scores:
        table.add_row(
            score.name, f"{score.documents:,}", f"{score.tokens:,}", f"{score.bytes:,}", f"{score.bytes_per_token:.3f}",
            f"{score.perplexity:.4g}", f"{score.bits_per_byte:.4f}",
        )  # fmt: skip
    print_table(table)


def text_values(score: TextScore) -> dict[str, Any]:
    """Return the scores of one text or domain for the output file."""
    return dataclasses.asdict(score) | {"perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}


def make_progress_callback(model: DistributedModel) -> Callable[[int], None]:
    """Return a callback that adds the number of newly scored rows to a counter and shows the total on the terminal."""
    num_rows = 0

    def on_rows(num_new_rows: int) -> None:
        nonlocal num_rows
        num_rows += num_new_rows
        sys.stderr.write(f"\r{num_rows:,} rows")
        sys.stderr.flush()

    return on_rows


def run(args: argparse.Namespace, names: dict[str, str]) -> None:
    """Evaluate and show the results. Collective.

    Args:
        names: receives this rank's name, for error messages, under the key "who".
    """
    from megatron import files

    grid, rank_device, names["who"] = initialize_ranks(args)
    model, chat = make_model(args, grid, rank_device)
    is_shown = grid.rank == 0 and sys.stderr.isatty()
    if is_shown:
        model.on_rows = make_progress_callback(model)

    def evaluate() -> dict[str, Any]:
        output: dict[str, Any] = {"load": str(args.load), "dtype": args.dtype, "max_length": model.max_length}
        if args.texts:
            scores = evaluate_texts(args, model)
            output["texts"] = {score.name: text_values(score) for score in scores}
            if is_shown:
                sys.stderr.write("\r")
            show_texts(scores)
        if args.tasks:
            results = evaluate_tasks(args, model, chat)
            output |= {"tasks": results.metrics, "notes": results.notes}
            if args.log_samples:
                output["samples"] = results.samples
            if is_shown:
                sys.stderr.write("\r")
            show_tasks(results)
        return output

    output = model.run_from_rank_0(evaluate)
    if output is not None and args.output is not None:
        text = json.dumps(output, ensure_ascii=False, indent=1, default=str)
        try:
            files.replace_bytes(args.output, text.encode() + b"\n")
        except OSError as error:
            raise DataError(f"--output {args.output} cannot be written: {error}") from None
        log.info(f"written: {args.output}")


def start_ranks(args: argparse.Namespace) -> None:
    """Replace this process by the launcher of the ranks that ``args`` requests."""
    num_ranks = args.model_parallel_size * args.pipe_parallel_size
    words = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(num_ranks), __file__, *sys.argv[1:]]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.stdout.flush()
    os.execve(sys.executable, words, {**os.environ, "PYTHONPATH": path})


def main() -> None:
    """Run the tool; an error ends the process with its exit code."""
    names = {"who": f"rank {os.environ.get('RANK', '0')}"}

    def run_tool() -> None:
        args = parse_args(__doc__ or "")
        if should_start_ranks(args):
            start_ranks(args)
        run(args, names)
        if world_size() > 1:
            from megatron.training import initialize

            initialize.stop()

    with suppress(BrokenPipeError):
        try:
            guard(run_tool, lambda: names["who"])
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()

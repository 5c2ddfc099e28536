"""Generate text with a checkpoint: GPT-2 continues prompts, T5 answers them, and --chat starts a conversation.

    python tools/generate.py --load runs/my-run --prompt "The tide" --prompt "At noon"
    python tools/generate.py --load runs/my-run --input prompts.txt --output answers.jsonl --json --top-p 0.9
    python tools/generate.py --load runs/my-t5 --prompt "The <extra_id_0> comes in twice a day."
    python tools/generate.py --load runs/my-run                        # reads prompts line by line
    python tools/generate.py --load runs/my-sft --chat                 # a conversation: each line is your turn
    python tools/generate.py --load runs/my-sft --chat --system "Be brief." --prompt "What is a tide?"
    python -m megatron.launch --nproc-per-node 4 tools/generate.py --model-parallel-size 2 --pipe-parallel-size 2 \\
        --load runs/my-run --input prompts.txt
    python -m megatron.launch --nproc-per-node 2 --stdin tools/generate.py --pipe-parallel-size 2 --load runs/my-run

--chat uses the chat template of the run (--chat-template), otherwise the template in the folder of its tokenizer, and
stops at the token that ends a turn in the template. The checkpoint may have any layout, or be a Hugging Face folder.
The text is the same in every layout and does not depend on the other prompts of a batch. Without --temperature, --top-k
or --top-p decoding is greedy.
Exit codes: 0, 2 (an invalid option or prompt), 3 (an invalid checkpoint), 4 (another rank failed), 5 (logits that are
not finite).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.errors import DataError, marked
from megatron.generate.options import parse_args, read_prompts, world_size
from megatron.runtime.exit_guard import guard

if TYPE_CHECKING:
    import torch

    from megatron.generate.text import Answer, TextGenerator
    from megatron.mpu.groups import Grid

TIMEOUT_S = 600
"""Seconds that a rank waits for tensors of other ranks; the first pass over long prompts on a CPU is slow."""


def make_generator(args: argparse.Namespace, grid: Grid, torch_device: torch.device) -> TextGenerator:
    """Return the generator that answers prompts with the model of --load. Collective."""
    from megatron import device
    from megatron.checkpoint.huggingface.tokenizer import vocabulary_of
    from megatron.generate import Sampling, load, open_model
    from megatron.generate.text import ChatPrompts, Prompts, TextGenerator
    from megatron.tokenizer.chat import find_template

    with marked(is_of_this_rank=False), ExitStack() as stack:  # a damaged file is an error on all ranks
        checkpoint, config = open_model(args.load, stack, grid.host)
        saved_probe = getattr(checkpoint, "metadata", {}).get("tokenizer_probe")
        vocabulary = vocabulary_of(config, args.tokenizer_path, saved_probe=saved_probe)
        if vocabulary is None:
            raise DataError(f"{checkpoint.path} does not specify a tokenizer. Set --tokenizer-path")
        if args.chat:
            template = find_template(vocabulary.tokenizer, args.chat_template or config.data.chat_template)
            prompts: Prompts = ChatPrompts(template, args.system)
            if problem := template.end_of_turn_problem:
                log.warn_once_per_job(problem)
        else:
            prompts = Prompts(vocabulary.tokenizer, vocabulary.t5, args.mode, adds_bos=args.add_bos_token)
        dtype = device.DTYPES[args.dtype]
        sharded_model = load(checkpoint, config, tensor=grid.tensor, pipe=grid.pipe, dtype=dtype, device=torch_device)
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    sampling_options = {name: value for name, value in options.items() if value is not None}
    return TextGenerator(
        sharded_model,
        prompts,
        grid.data,
        batch_size=args.batch_size or TextGenerator.batch_size,
        max_new_tokens=args.max_new_tokens,
        sampling=Sampling(**sampling_options) if sampling_options else None,
    )


def initialize_ranks(args: argparse.Namespace) -> tuple[Grid, torch.device, str]:
    """Initialize the ranks, and return the grid, this rank's device and its name. Collective."""
    from megatron import device
    from megatron.arguments import config_from_values
    from megatron.mpu.groups import single_grid
    from megatron.training import initialize
    from megatron.training.device_setup import configure_device

    if world_size() == 1:
        device_type = configure_device(config_from_values({"device": args.device}))
        return single_grid(), device.bind(device_type, 0), "rank 0"
    values: dict[str, Any] = {"pipe_parallel_size": args.pipe_parallel_size, "dtype": args.dtype}
    values |= {"model_parallel_size": args.model_parallel_size, "device": args.device}
    world = initialize.start(config_from_values({**values, "phase_timeout_minutes": TIMEOUT_S / 60}))
    log.configure(world.rank)
    return world.grid, world.device, world.name


def answer_texts(answers: list[Answer], args: argparse.Namespace, *, with_prompt: bool) -> str:
    """Return the output for ``answers``: JSON lines, or texts, with headings if there are several."""
    if args.json:
        return "".join(json.dumps(dataclasses.asdict(answer), ensure_ascii=False) + "\n" for answer in answers)
    texts = [(answer.prompt if with_prompt else "") + answer.text + "\n" for answer in answers]
    if len(texts) == 1:
        return texts[0]
    return "".join(f"--- {answer_number}\n{text}" for answer_number, text in enumerate(texts, 1))


def write(text: str, output: Path | None) -> None:
    """Write ``text`` atomically to the file, or to standard output."""
    from megatron import files

    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        files.replace_bytes(output, text.encode())
    except OSError as error:
        raise DataError(f"--output {output} cannot be written: {error}") from None


def run(args: argparse.Namespace, names: dict[str, str]) -> None:
    """Answer the prompts, or read prompts interactively. Collective.

    Args:
        names: receives this rank's name, for error messages, under the key "who".
    """
    from megatron.generate.text import interactive

    texts = read_prompts(args)
    grid, rank_device, names["who"] = initialize_ranks(args)
    generator = make_generator(args, grid, rank_device)
    if texts is None:
        if grid.rank == 0:
            log.info(f"each line is {'your turn' if args.chat else 'a prompt'}; press Ctrl-D to exit")
        interactive(generator, grid.host)
    else:
        answers = generator.answer(texts)
        if grid.rank == 0:
            with_prompt = generator.prompts.t5_tokens is None and not args.chat
            write(answer_texts(answers, args, with_prompt=with_prompt), args.output)


def main() -> None:
    """Run the tool; an error ends the process with its exit code."""
    names = {"who": f"rank {os.environ.get('RANK', '0')}"}

    def run_tool() -> None:
        run(parse_args(__doc__ or ""), names)
        if world_size() > 1:
            from megatron.training import initialize

            initialize.stop()

    try:
        guard(run_tool, lambda: names["who"])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

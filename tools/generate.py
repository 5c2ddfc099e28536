"""Write text with a model of a checkpoint: GPT-2 goes on from a prompt, T5 answers one, --chat talks.

    python tools/generate.py --load runs/my-run --prompt "The tide" --prompt "At noon"
    python tools/generate.py --load runs/my-run --input prompts.txt --output answers.jsonl --json --top-p 0.9
    python tools/generate.py --load runs/my-t5 --prompt "The <extra_id_0> comes in twice a day."
    python tools/generate.py --load runs/my-run                        asks for a line at a time
    python tools/generate.py --load runs/my-sft --chat                 a conversation: each line is your turn
    python tools/generate.py --load runs/my-sft --chat --system "Be brief." --prompt "What is a tide?"
    python -m megatron.launch --nproc-per-node 4 tools/generate.py --model-parallel-size 2 --pipe-parallel-size 2 \\
        --load runs/my-run --input prompts.txt
    python -m megatron.launch --nproc-per-node 2 --stdin tools/generate.py --pipe-parallel-size 2 --load runs/my-run

--chat takes the chat template of the run (--chat-template), else that of its tokenizer's folder; it stops at the token
with which the template ends a turn. The checkpoint may be of any layout, or be a Hugging Face folder, and the text is
the same in every layout: in a batch each prompt gets what it would get alone. Without --temperature, --top-k or --top-p
the likeliest token is taken each time. Ends with code 0, 2 (an option or prompt), 3 (a checkpoint), 4 (another rank) or
5 (logits that are no numbers).
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
"""How long ranks wait for each other's layers: a first pass over long prompts on a CPU takes its time."""


def make_writer(args: argparse.Namespace, grid: Grid, place: torch.device) -> TextGenerator:
    """Return what answers prompts with the model of --load. Collective."""
    from megatron import device
    from megatron.checkpoint.huggingface.tokenizer import vocabulary_of
    from megatron.generate import Sampling, load, open_model
    from megatron.generate.text import ChatPrompts, Prompts, TextGenerator
    from megatron.tokenizer.chat import find_template

    with marked(is_of_this_rank=False), ExitStack() as stack:  # a damaged file is an error on all ranks alike
        checkpoint, config = open_model(args.load, stack, grid.host)
        vocabulary = vocabulary_of(config, args.tokenizer_path)
        if vocabulary is None:
            raise DataError(f"{checkpoint.path} names no tokenizer. Name it with --tokenizer-path")
        if args.chat:
            template = find_template(vocabulary.tokenizer, args.chat_template or config.data.chat_template)
            prompts: Prompts = ChatPrompts(template, args.system)
            if problem := template.end_of_turn_problem:
                log.warn_once_per_job(problem)
        else:
            prompts = Prompts(vocabulary.tokenizer, vocabulary.t5, args.mode, adds_bos=args.add_bos_token)
        kind = device.DTYPES[args.dtype]
        part = load(checkpoint, config, tensor=grid.tensor, pipe=grid.pipe, dtype=kind, device=place)
    drawing = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    given = {name: value for name, value in drawing.items() if value is not None}
    return TextGenerator(
        part,
        prompts,
        grid.data,
        batch_size=args.batch_size or TextGenerator.batch_size,
        max_new_tokens=args.max_new_tokens,
        sampling=Sampling(**given) if given else None,
    )


def start(args: argparse.Namespace) -> tuple[Grid, torch.device, str]:
    """Return the grid of ranks, this rank's device and its name. Collective."""
    from megatron import device
    from megatron.arguments import config_from_values
    from megatron.mpu.groups import single_grid
    from megatron.training import initialize
    from megatron.training.device_setup import configure_device

    if world_size() == 1:
        kind = configure_device(config_from_values({"device": args.device}))
        return single_grid(), device.bind(kind, 0), "rank 0"
    values: dict[str, Any] = {"pipe_parallel_size": args.pipe_parallel_size, "dtype": args.dtype}
    values |= {"model_parallel_size": args.model_parallel_size, "device": args.device}
    here = initialize.start(config_from_values({**values, "phase_timeout_minutes": TIMEOUT_S / 60}))
    log.configure(here.rank)
    return here.grid, here.device, here.name


def answer_texts(answers: list[Answer], args: argparse.Namespace, *, with_prompt: bool) -> str:
    """Return what is written of ``answers``: JSON lines, or texts, under headings where there are several."""
    if args.json:
        return "".join(json.dumps(dataclasses.asdict(one), ensure_ascii=False) + "\n" for one in answers)
    texts = [(one.prompt if with_prompt else "") + one.text + "\n" for one in answers]
    if len(texts) == 1:
        return texts[0]
    return "".join(f"--- {number}\n{text}" for number, text in enumerate(texts, 1))


def write(text: str, output: Path | None) -> None:
    """Write ``text`` to the file, which is then whole or as before, or to standard output."""
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
    """Answer the prompts, or ask for some. Collective.

    Args:
        names: its "who" becomes this rank's name, for messages.
    """
    from megatron.generate.text import interactive

    texts = read_prompts(args)
    grid, place, names["who"] = start(args)
    writer = make_writer(args, grid, place)
    if texts is None:
        if grid.rank == 0:
            log.info(f"each line is {'your turn' if args.chat else 'a prompt'}; Ctrl-D ends")
        interactive(writer, grid.host)
    else:
        answers = writer.answer(texts)
        if grid.rank == 0:
            goes_on = writer.prompts.tokens is None and not args.chat
            write(answer_texts(answers, args, with_prompt=goes_on), args.output)


def main() -> None:
    """Run the tool; an error ends the process with its code."""
    names = {"who": f"rank {os.environ.get('RANK', '0')}"}

    def together() -> None:
        run(parse_args(__doc__ or ""), names)
        if world_size() > 1:
            from megatron.training import initialize

            initialize.stop()

    try:
        guard(together, lambda: names["who"])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

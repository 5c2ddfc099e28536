"""Import a checkpoint of Megatron-LM, CPM-Pretrain or CPM-1 as the first checkpoint of a run.

    python tools/import_checkpoint.py --input CPM-large --output runs/cpm1 --num-attention-heads 32
    python tools/import_checkpoint.py --input megatron/checkpoints --output runs/from-megatron
    python pretrain_gpt2.py --load runs/cpm1 --finetune ...      # with the flags that it prints

Supported files are iter_N/mp_rank_XX/model_optim_rng.pt (with a pipeline, too), mp_rank_XX_model_states.pt and
DeepSpeed's layer_XX-model_YY-model_states.pt, saved by any number of tensor ranks and stages. Supported models are
T5 with learned positions, and decoders with the names of Megatron-LM or Megatron-Core: GPT-2, also with rotary
positions, grouped queries, SwiGLU, squared ReLU, RMS norms or --apply-layernorm-1p. Only the weights are imported, bit
for bit; no code in the files is executed. The result can be loaded in any layout.
Exit codes: 0, 2 (an invalid option), 3 (a checkpoint that cannot be imported).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.config.model import ModelConfig
from megatron.config.option import options_of
from megatron.errors import exit_code

QKV_ORDERS = ("3-heads-d", "heads-d-3", "heads-3-d")


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--input", type=Path, required=True, help="folder of the checkpoint, or the folder that points to it")
    add("--output", type=Path, required=True, help="run folder to write; must be new or empty")
    add("--iteration", help="iteration to import (default: the one to which the folder points)")
    add(
        "--num-attention-heads",
        type=positive_int,
        metavar="A",
        help="heads (default: from the files; required for CPM-1)",
    )
    add(
        "--qkv-order", choices=QKV_ORDERS,
        help="order of the rows of query, key and value on each tensor rank (default: by the version in the files; "
        "3-heads-d for CPM-1)",
    )  # fmt: skip
    choices = next(option.choices for option in options_of(ModelConfig) if option.name == "activation")
    add("--activation", choices=choices, help="default: gelu-tanh, unless the files specify exact GELU")
    add("--vocab-size", type=positive_int, metavar="V", help="drop padding rows after the first V (default: keep all)")
    return parser.parse_args(argv)


def import_(args: argparse.Namespace) -> None:
    """Write the run folder and log the command that starts from it."""
    from megatron.checkpoint.huggingface.config import model_flags
    from megatron.checkpoint.legacy.convert import ImportOptions, import_checkpoint

    wishes = ImportOptions(args.iteration, args.num_attention_heads, args.qkv_order, args.activation, args.vocab_size)
    path, config, notes = import_checkpoint(args.input, args.output, wishes)
    for note in notes:
        log.info(note)
    words = ["--load", str(args.output), "--finetune", *model_flags(config)]
    log.info(f"{args.input} -> {path}\nstart from it with: pretrain_{config.family}.py {shlex.join(words)}")


def main() -> int:
    """Run the tool and return the exit code."""
    args = parse_args()
    try:
        import_(args)
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())

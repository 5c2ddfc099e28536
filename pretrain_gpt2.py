"""Pretrain a decoder: GPT-2, or the one that ``--model`` names. ``--help`` lists the flags.

``bash run_gpt2.sh`` starts it on all devices of a machine. Its functions are those of
``megatron/training/programs/decoder.py``; ``examples/own_model.py`` has them spelled out for a model of your own.
"""

from __future__ import annotations

from megatron.training.programs.decoder import (
    forward_step,
    get_batch,
    get_batch_pipe,
    main,
    model_provider,
    train_valid_test_datasets_provider,
)

__all__ = [
    "forward_step", "get_batch", "get_batch_pipe", "main", "model_provider", "train_valid_test_datasets_provider"
]  # fmt: skip

if __name__ == "__main__":
    main()

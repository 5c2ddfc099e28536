"""Pretrain T5. ``bash run_t5.sh`` starts it on all devices of a machine; ``--help`` lists the flags."""

from __future__ import annotations

from megatron.training.programs.t5 import (
    DEFAULTS,
    forward_step,
    get_batch,
    get_batch_pipe,
    main,
    model_provider,
    t5_tokens,
    train_valid_test_datasets_provider,
)

__all__ = [
    "DEFAULTS", "forward_step", "get_batch", "get_batch_pipe", "main", "model_provider", "t5_tokens",
    "train_valid_test_datasets_provider",
]  # fmt: skip

if __name__ == "__main__":
    main()

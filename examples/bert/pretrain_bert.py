"""Pretrain BERT. ``bash examples/bert/run_bert.sh`` starts it on all devices; ``--help`` shows the flags."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.training.programs.bert import (  # noqa: E402
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

"""Pretrain LLaMA: an alias of ``pretrain_gpt2.py --model llama`` for existing scripts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pretrain_gpt2 import *  # noqa: E402, F403
from pretrain_gpt2 import main  # noqa: E402

if __name__ == "__main__":
    main("llama")

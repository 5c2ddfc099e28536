"""Family -> pretraining script that benchmarks start."""

from __future__ import annotations

SCRIPTS = {
    "gpt2": "pretrain_gpt2.py",
    "t5": "pretrain_t5.py",
    "llama": "examples/llama/pretrain_llama.py",
    "mpt": "examples/mpt/pretrain_mpt.py",
    "bert": "examples/bert/pretrain_bert.py",
}

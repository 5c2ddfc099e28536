"""Pretrain BERT with the scripts of Megatron-LM and Megatron-DeepSpeed, which call this name.

The program is ``examples/bert/pretrain_bert.py``; where a script is silent Megatron's defaults hold:
``megatron.arguments.other_programs``.
"""

from __future__ import annotations

from megatron.arguments.other_programs import BERT
from megatron.training.programs.bert import main

if __name__ == "__main__":
    main(args_defaults=BERT)

"""Pretrain BERT with the scripts of Megatron-LM and Megatron-DeepSpeed, which call this name.

The program is ``examples/bert/pretrain_bert.py``; where a script is silent Megatron's defaults hold:
``megatron.arguments.other_programs``.
"""

from __future__ import annotations

from examples.bert.pretrain_bert import forward_step, model_provider, train_valid_test_datasets_provider
from megatron.arguments.other_programs import BERT
from megatron.training import pretrain

if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider, model_provider, forward_step, args_defaults=BERT, family="bert", name="bert"
    )

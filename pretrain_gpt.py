"""Pretrain GPT with the scripts of Megatron-LM, Megatron-DeepSpeed and BigScience, which call this name.

The program is ``pretrain_gpt2.py``; where a script is silent Megatron's defaults hold
(``megatron.arguments.other_programs``).
"""

from __future__ import annotations

from megatron.arguments.other_programs import GPT
from megatron.training import pretrain
from pretrain_gpt2 import forward_step, model_provider, train_valid_test_datasets_provider

if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step, args_defaults=GPT, name="gpt")

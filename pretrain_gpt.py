"""Pretrain GPT with the scripts of Megatron-LM, Megatron-DeepSpeed and BigScience, which call this name.

The program is ``pretrain_gpt2.py``; where a script is silent Megatron's defaults hold
(``megatron.arguments.other_programs``). ``--model`` replaces their architecture and keeps the others.
"""

from __future__ import annotations

from megatron.arguments.other_programs import GPT
from megatron.training.programs.decoder import main

if __name__ == "__main__":
    main(args_defaults=GPT, name="gpt")

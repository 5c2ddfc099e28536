"""What a model costs: parameters, FLOPs, memory; and how its units are shared out over stages. Arithmetic only.

``cost.of(config)`` returns the ``Costs`` of the model of a configuration, of any family.

Letters as in docs/glossary.md: ``L`` layers, ``h`` hidden, ``a`` heads, ``d`` size of a head, ``f`` feed-forward,
``v`` vocabulary, ``s`` sequence, ``b`` micro-batch, ``t`` tensor size, ``p`` stages. Forward and backward: 3 x forward.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron.cost.costs import Costs as Costs
from megatron.cost.gpt2 import GPT2Costs as GPT2Costs
from megatron.cost.memory import BYTES as BYTES
from megatron.cost.memory import Memory as Memory
from megatron.cost.memory import Zero as Zero
from megatron.cost.peaks import peak_flops as peak_flops
from megatron.cost.t5 import T5Costs as T5Costs
from megatron.cost.waiting import waiting_of as waiting_of


def __getattr__(name: str) -> Any:
    if name != "of":
        raise AttributeError(f"module 'megatron.cost' has no attribute {name!r}")
    return importlib.import_module("megatron.models").costs_of  # above this package: found when it is asked for

"""Single-stage modules that take their groups as arguments and return tensors; they know nothing of DeepSpeed."""

from megatron.model.gpt2 import GPT2Model
from megatron.model.sizes import Sizes

__all__ = ["GPT2Model", "Sizes"]

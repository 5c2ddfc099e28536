"""The contenders of ``step_time.py --model llama``; ``contenders.py`` has the table."""

from __future__ import annotations

import torch

from benchmarks.contenders import Contender, filled, ours, ours_compiled
from benchmarks.flags import config_of
from benchmarks.plain_loop import Fields, MeanLoss, PlainLoop, Step
from benchmarks.sizes import LlamaSizes
from megatron import device
from megatron.models.llama.huggingface import FORMAT
from megatron.models.registry import build_model
from megatron.training.setup import weight_rule


def hf(sizes: LlamaSizes, batch_size: int, kind: str, dtype: str) -> Step:
    """Return a step of Hugging Face's model in the plain loop."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours_of_it = config_of(sizes)
    settings = {name: value for name, value in FORMAT.fields(ours_of_it).items() if name != "architectures"}
    config = LlamaConfig(
        **settings | {"use_cache": False, "attn_implementation": "sdpa", "loss_type": "ForCausalLM"},
        bos_token_id=None,
        eos_token_id=None,
    )
    with device.bind(kind, 0):
        model = LlamaForCausalLM(config)
    weights = filled(build_model(ours_of_it, None), weight_rule(ours_of_it))
    model.load_state_dict(FORMAT.from_ours(weights, ours_of_it))
    return PlainLoop(MeanLoss(model, ("labels", "shift_labels")), _shifted, kind=kind, dtype=dtype).step


CONTENDERS: dict[str, Contender] = {"ours": ours, "ours-compiled": ours_compiled, "hf": hf}


def _shifted(batch: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [b, s]."""
    return batch["text"][:, :-1].contiguous(), batch["text"][:, 1:].contiguous()

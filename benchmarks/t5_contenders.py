"""The contenders of ``step_time.py --model t5``; ``contenders.py`` has the table."""

from __future__ import annotations

import torch

from benchmarks.contenders import Contender, filled, ours, ours_compiled
from benchmarks.flags import config_of
from benchmarks.plain_loop import Fields, MeanLoss, PlainLoop, Step
from benchmarks.sizes import START_ID, T5Sizes
from megatron import device
from megatron.models.t5.huggingface import from_ours
from megatron.models.t5.model import T5Model, t5_model_args_from, t5_rule


def our_weights(sizes: T5Sizes) -> dict[str, torch.Tensor]:
    """Return the weights that every contender starts from, by our logical names."""
    config = config_of(sizes)
    full = t5_model_args_from(config.model, config.own)
    return filled(T5Model(full), t5_rule(full, config.model.init_method_std))


def hf(sizes: T5Sizes, batch_size: int, kind: str, dtype: str, attention: str = "sdpa") -> Step:
    """Return a step of Hugging Face's model in the plain loop."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=sizes.vocab_size,
        d_model=sizes.hidden_size,
        d_kv=sizes.hidden_size // sizes.num_attention_heads,
        d_ff=4 * sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_attention_heads,
        dropout_rate=0.0,
        use_cache=False,
        attn_implementation=attention,
        pad_token_id=START_ID,
        decoder_start_token_id=START_ID,
    )
    with device.bind(kind, 0):
        model = T5ForConditionalGeneration(config)
    model.load_state_dict(from_ours(our_weights(sizes), sizes.num_attention_heads))
    return PlainLoop(MeanLoss(model), _pair, kind=kind, dtype=dtype).step


def hf_eager(sizes: T5Sizes, batch_size: int, kind: str, dtype: str) -> Step:
    """Return a step of Hugging Face's model with its attention written out."""
    return hf(sizes, batch_size, kind, dtype, attention="eager")


CONTENDERS: dict[str, Contender] = {"ours": ours, "ours-compiled": ours_compiled, "hf": hf, "hf-eager": hf_eager}


def _pair(batch: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [b, s_e] and targets [b, s_d]; Hugging Face's model shifts them itself."""
    return batch["inputs"], batch["targets"]

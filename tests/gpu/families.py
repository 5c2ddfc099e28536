"""A small model of each family with known weights, and a batch for it: odd lengths, a prime vocabulary."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron import device
from megatron.models.bert.model import BertModel, BertModelArgs
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5Model
from megatron.ops.attention import positions_in_segments
from tests.gpu.near import to_device
from tests.helpers.llama_samples import LLAMA
from tests.helpers.mpt_samples import MPT

VOCAB, SEQ, DECODER_SEQ, BATCH = 211, 61, 37, 3
COMMON = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "kv_hidden_size": 16, "ff_hidden_size": 96,
    "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {
    **COMMON, "enc_layers": 2, "dec_layers": 2, "hidden_bias": False, "layernorm_epsilon": 1e-6, "activation": "relu",
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
EXTRA_TOLERANCE = {torch.float16: 8.0, torch.bfloat16: 3.0}
"""Of T5 and clipped MPT: how much more is allowed than ``near.ALLOWED`` says."""
V1_1 = {"activation": "gated-gelu", "untie_embeddings": True}
CPM_SETTINGS = {
    "position_embedding_type": "learned",
    "hidden_bias": True,
    "activation": "gelu",
    "layernorm_epsilon": 1e-5,
}


@dataclass(frozen=True)
class Family:
    """How a model is built, and what it is given.

    Args:
        make_batch: from whether documents are apart to what ``forward`` takes, by name; labels make it a loss.
        tolerance_factors: as ``EXTRA_TOLERANCE``.
    """

    model_class: Callable[..., torch.nn.Module]
    args: Any
    make_batch: Callable[[bool], dict[str, Any]]
    tolerance_factors: Mapping[torch.dtype, float] = field(default_factory=dict)


def decoder_batch(has_documents: bool) -> dict[str, Any]:
    """Return what a decoder takes."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    mask = (torch.rand(BATCH, SEQ, generator=generator) < 0.8).float()
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
    starts = (torch.rand(BATCH, SEQ, generator=generator) < 0.1).long()
    segments = starts.cumsum(dim=1)
    positions = positions_in_segments(segments) if has_documents else torch.arange(SEQ).expand(BATCH, SEQ)
    return batch | {"position_ids": positions} | ({"segment_ids": segments} if has_documents else {})


def mpt_batch(has_documents: bool) -> dict[str, Any]:
    """Return what an MPT takes, which has no positions."""
    return {name: value for name, value in decoder_batch(has_documents).items() if name != "position_ids"}


def t5_batch(has_documents: bool) -> dict[str, Any]:
    """Return what a T5 takes; with documents some, and padding, of which the decoder has more than the encoder."""
    generator = torch.Generator().manual_seed(8)
    lengths = {"enc_tokens": SEQ, "dec_tokens": DECODER_SEQ, "labels": DECODER_SEQ}
    batch: dict[str, Any] = {
        name: torch.randint(0, VOCAB, (BATCH, s), generator=generator) for name, s in lengths.items()
    }
    batch["loss_mask"] = torch.ones(BATCH, DECODER_SEQ)
    if has_documents:
        enc = [[0] * 30 + [1] * 21 + [-1] * 10, [0] * SEQ, [0] * 40 + [1] * 21]
        dec = [[0] * 15 + [1] * 15 + [-1] * 7, [0] * 30 + [-1] * 7, [0] * 20 + [1] * 17]
        batch["enc_segments"], batch["dec_segments"] = (torch.tensor(rows, dtype=torch.int32) for rows in (enc, dec))
        batch["loss_mask"] = (batch["dec_segments"] >= 0).float()
    return batch


def bert_batch(has_documents: bool) -> dict[str, Any]:
    """Return what a BERT takes, padded where documents are asked for."""
    generator = torch.Generator().manual_seed(9)
    tokens, labels = (torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator) for _ in range(2))
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    is_real = positions < torch.tensor([[SEQ], [50], [33]]) if has_documents else positions >= 0
    batch = {
        "tokens": tokens,
        "token_types": (positions >= 20).long(),
        "labels": labels,
        "loss_mask": ((torch.rand(BATCH, SEQ, generator=generator) < 0.2) & is_real).float(),
        "is_random": torch.tensor([0, 1, 1]),
    }
    return batch | ({"segments": is_real.int() - 1} if has_documents else {})


FAMILIES = {
    "gpt2": Family(DecoderModel, ModelArgs(**COMMON), decoder_batch),
    "gpt2 untied": Family(
        DecoderModel,
        ModelArgs(
            **COMMON,
            untie_embeddings=True,
            activation="gelu-tanh",
            apply_residual_connection_post_layernorm=True,
            make_vocab_size_divisible_by=64,
        ),
        decoder_batch,
    ),
    "t5": Family(T5Model, T5ModelArgs(**T5), t5_batch, EXTRA_TOLERANCE),
    "t5 v1.1": Family(
        T5Model, T5ModelArgs(**{**T5, "activation": "gated-gelu", "untie_embeddings": True}), t5_batch, EXTRA_TOLERANCE
    ),
    "t5 as CPM": Family(T5Model, T5ModelArgs(**{**T5, **CPM_SETTINGS}), t5_batch),
    "llama": Family(DecoderModel, ModelArgs(**COMMON, **LLAMA, num_query_groups=2), decoder_batch),
    "sinks": Family(
        DecoderModel,
        ModelArgs(
            **COMMON,
            **{**LLAMA, "activation": "gated-quick-gelu"},
            num_query_groups=2,
            softmax_type="learnable",
            attention_output_gate=True,
            activation_func_clamp_value=1.0,
            window_size=9,
            window_attn_skip_freq="2",
        ),
        decoder_batch,
        EXTRA_TOLERANCE,
    ),
    "mpt": Family(DecoderModel, ModelArgs(**COMMON, **MPT), mpt_batch),
    "mpt clipped": Family(DecoderModel, ModelArgs(**COMMON, **MPT, clip_qkv=1.0), mpt_batch, EXTRA_TOLERANCE),
    "bert": Family(BertModel, BertModelArgs(**{**COMMON, "layernorm_epsilon": 1e-12}), bert_batch),
}


def known_weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of a parameter in fp64: products keep the size of what goes in, norms are near 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values * 0.8 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1 * values + name.endswith("norm.weight")


def build_model(
    family: Family, dtype: torch.dtype, torch_device: torch.device, where: ParallelContext | None = None, **changes: Any
) -> torch.nn.Module:
    """Return the family's model of ``dtype`` on ``torch_device``, with known weights that ``dtype`` can hold.

    Args:
        where: its groups and dropout; None: one process.
        changes: of its sizes.
    """
    model = family.model_class(replace(family.args, **changes), where)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(known_weight(name, tuple(parameter.shape)).to(torch.float32))
    for parameter in model.to(dtype).parameters():  # they stay the objects that they are, as in a run
        device.replace_data(parameter, parameter.detach().to(torch_device))
    return model.to(torch_device)


def build_reference(
    family: Family, dtype: torch.dtype, where: ParallelContext | None = None, **changes: Any
) -> torch.nn.Module:
    """Return the same model in fp64 on the CPU, its weights rounded as ``dtype`` rounds them."""
    cpu = torch.device("cpu")
    rounded = build_model(family, dtype, cpu, where, **changes)
    return rounded.double()


def make_inputs(family: Family, torch_device: torch.device, has_documents: bool = False) -> dict[str, Any]:
    """Return the family's batch on ``torch_device``."""
    return {name: to_device(value, torch_device) for name, value in family.make_batch(has_documents).items()}


def loss_of(output: Any) -> torch.Tensor:
    """Return the mean of what a model returns with labels: a pair of sum and count, or several by name."""
    total, count = output["loss"] if isinstance(output, dict) else output
    return total / count


def named_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of all parameters, each of which must have one."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, gradient in grads.items() if gradient is None]
    assert not missing, "no gradient has come here"
    return {name: gradient for name, gradient in grads.items() if gradient is not None}

"""Small models of all families with dropout: their loss, gradients, and memory between forward and backward."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.models.bert.model import BertModel
from megatron.models.common.decoder import DecoderModel
from megatron.models.t5.model import T5Model
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.random import DropoutKey
from tests.helpers.bert_samples import bert_model_args, make_bert_batch
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import fill_weights, make_batch, make_parallel_context, small_model_args
from tests.helpers.mpt_samples import mpt_model_args
from tests.helpers.t5_samples import make_t5_batch, t5_model_args

NUM_LAYERS = 3
FAMILIES = ("gpt2", "t5", "llama", "mpt", "bert")
DROPOUT_RATES = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


def make_model(
    family: str, group: Group = SINGLE, dtype: torch.dtype = torch.float32, **overrides: Any
) -> torch.nn.Module:
    """Return a filled model with dropout and ``NUM_LAYERS`` layers (T5: on each side)."""
    parallel, overrides = make_parallel_context(group), {**DROPOUT_RATES, "num_layers": NUM_LAYERS, **overrides}
    if family == "t5":
        return fill_weights(
            T5Model(t5_model_args(**{"enc_layers": NUM_LAYERS, "dec_layers": NUM_LAYERS, **overrides}), parallel)
        ).to(dtype)
    args = {"gpt2": small_model_args, "mpt": mpt_model_args, "bert": bert_model_args, "llama": llama_model_args}[
        family
    ](**overrides)
    model_class = BertModel if family == "bert" else DecoderModel
    return fill_weights(model_class(args, parallel)).to(dtype)


def compute_loss(model: torch.nn.Module) -> torch.Tensor:
    """Return the loss of a micro-batch with several documents.

    The dropout position then advances to the next micro-batch, as in a pipeline before the backward pass.
    """
    inputs = dict(
        vars({"T5Model": make_t5_batch, "BertModel": make_bert_batch}.get(type(model).__name__, make_batch)())
    )
    model.parallel.streams.position = DropoutKey(2, 1)
    output = model(**inputs)
    model.parallel.streams.position = DropoutKey(2, 2)
    return (output["loss"] if isinstance(output, dict) else output)[0]


def loss_and_grads(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the loss and the gradients."""
    loss = compute_loss(model)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


class StorageTracker(TorchDispatchMode):
    """Tracks the storages that operations create, including those that only autograd retains."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                self._storages[storage.cdata] = (storage, tensor.untyped_storage().nbytes())
        return result

    def live_bytes(self) -> int:
        """Return the bytes of all storages that still exist."""
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def measure_saved_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that a forward pass retains for the backward pass, without the parameters.

    The minimum of several readings is used, because gloo retains reduced tensors for a moment.
    """
    param_storages = {StorageWeakRef(p.untyped_storage()).cdata for p in model.parameters()}
    with StorageTracker() as storages:
        loss = compute_loss(model)
        live_bytes = min(storages.live_bytes() for _ in range(20) if time.sleep(0.002 * dist.is_initialized()) is None)
    param_bytes = sum(param_bytes for cdata, (_, param_bytes) in storages._storages.items() if cdata in param_storages)
    loss.backward()
    return live_bytes - param_bytes

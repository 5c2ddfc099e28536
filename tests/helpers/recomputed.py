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
from tests.helpers.bert_samples import bert_batch, bert_sizes
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import batch_of, filled, place_of, small_sizes
from tests.helpers.mpt_samples import mpt_sizes
from tests.helpers.t5_samples import t5_batch, t5_sizes

LAYERS = 3
FAMILIES = ("gpt2", "t5", "llama", "mpt", "bert")
RATES = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


def make(family: str, group: Group = SINGLE, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """Return a filled model with dropout and ``LAYERS`` layers (T5: on each side)."""
    parallel, changes = place_of(group), {**RATES, "num_layers": LAYERS, **changes}
    if family == "t5":
        return filled(T5Model(t5_sizes(**{"enc_layers": LAYERS, "dec_layers": LAYERS, **changes}), parallel)).to(dtype)
    sizes = {"gpt2": small_sizes, "mpt": mpt_sizes, "bert": bert_sizes, "llama": llama_sizes}[family](**changes)
    model = BertModel if family == "bert" else DecoderModel
    return filled(model(sizes, parallel)).to(dtype)


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    """Return the loss of a micro-batch with several documents.

    The dropout position then advances to the next micro-batch, as in a pipeline before the backward pass.
    """
    inputs = dict(vars({"T5Model": t5_batch, "BertModel": bert_batch}.get(type(model).__name__, batch_of)()))
    model.place.streams.position = DropoutKey(2, 1)
    output = model(**inputs)
    model.place.streams.position = DropoutKey(2, 2)
    return (output["loss"] if isinstance(output, dict) else output)[0]


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the loss and the gradients."""
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


class Storages(TorchDispatchMode):
    """Tracks the storages that operations create, including those that only autograd retains."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                self._seen[storage.cdata] = (storage, tensor.untyped_storage().nbytes())
        return result

    def live(self) -> int:
        """Return the bytes of all storages that still exist."""
        return sum(size for storage, size in self._seen.values() if not storage.expired())


def kept_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that a forward pass retains for the backward pass, without the parameters.

    The minimum of several readings is used, because gloo retains reduced tensors for a moment.
    """
    param_storages = {StorageWeakRef(p.untyped_storage()).cdata for p in model.parameters()}
    with Storages() as storages:
        loss = loss_of(model)
        live_bytes = min(storages.live() for _ in range(20) if time.sleep(0.002 * dist.is_initialized()) is None)
    param_bytes = sum(param_bytes for cdata, (_, param_bytes) in storages._seen.items() if cdata in param_storages)
    loss.backward()
    return live_bytes - param_bytes

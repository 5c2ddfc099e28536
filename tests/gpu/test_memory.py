"""What lies on the device and what on the host: uploads, inputs of recomputed layers, copies for a save."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron import device
from megatron.checkpoint import TensorRecord
from megatron.checkpoint.staging_buffer import StagingBuffer
from megatron.mpu.activation_storage import ActivationOffload, ActivationStorage
from megatron.mpu.data import Upload, broadcast_data
from megatron.mpu.groups import SINGLE
from megatron.mpu.random import DropoutStreams, checkpoint
from megatron.mpu.shard import Shard

pytestmark = pytest.mark.gpu
LAYERS, ROWS, H = 12, 256, 512


def pin_for_device(tensor: torch.Tensor, torch_device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if torch_device.type == "cuda" else tensor


def start_busy_work(torch_device: torch.device) -> torch.Tensor:
    """Return what the device will only have done after some milliseconds."""
    size = 2048 if torch_device.type == "cuda" else 64
    work = torch.full((size, size), 1.0 / size, device=torch_device)
    for _ in range(20):
        work = work @ work
    return work.sum()


def test_uploads_are_complete_while_device_computes(torch_device: torch.device) -> None:
    totals, uploads = [], []
    for batch_idx in range(32):
        host_batch = {
            "text": pin_for_device(torch.full((256, 512), batch_idx), torch_device),
            "more": pin_for_device(torch.arange(batch_idx), torch_device),
        }
        batch = Upload(host_batch, torch_device)
        busy_result = start_busy_work(torch_device)
        text = broadcast_data(["text", "more"], batch, torch.int64, SINGLE, torch_device)
        assert {tensor.device.type for tensor in text.values()} == {torch_device.type}
        totals.append(text["text"].sum() + text["more"].sum() + 0 * busy_result.long())
        uploads.append(batch if batch_idx % 2 else None)  # the memory of others is given to later uploads
    expected = [batch_idx * 256 * 512 + batch_idx * (batch_idx - 1) // 2 for batch_idx in range(32)]
    assert [int(tensor) for tensor in totals] == expected


def test_changed_batch_is_copied_again(torch_device: torch.device) -> None:
    batch = Upload(
        {"text": pin_for_device(torch.arange(6), torch_device), "more": pin_for_device(torch.arange(3), torch_device)},
        torch_device,
    )
    batch["text"] = batch["text"][:2] + 5
    batch["more"][0] = 9
    tensors = broadcast_data(["text", "more"], batch, torch.int64, SINGLE, torch_device)
    assert tensors["text"].tolist() == [5, 6] and tensors["more"].tolist() == [9, 1, 2]


def gradients_of_layers(
    torch_device: torch.device, storage: ActivationStorage | None, dropout: float
) -> tuple[float, list[torch.Tensor]]:
    """Return the loss of a stack of recomputed layers, and the gradients of its weights; ``storage`` None: kept."""
    generator = torch.Generator().manual_seed(1)
    weights = [
        (torch.randn(H, H, generator=generator) / H**0.5).to(torch_device).requires_grad_() for _ in range(LAYERS)
    ]
    x = torch.randn(ROWS, H, generator=generator).to(torch_device).requires_grad_()
    streams = DropoutStreams(5)

    def layer(layer_idx: int, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ weights[layer_idx])
        return x + streams.dropout(hidden, dropout, training=True, layer=layer_idx, site="here")

    for layer_idx in range(LAYERS):
        run = partial(layer, layer_idx)
        x = run(x) if storage is None else checkpoint(streams, run, x, storage=storage)
    loss = x.square().mean()
    loss.backward()
    grads = [weight.grad for weight in weights]
    assert all(gradient is not None for gradient in grads)
    return loss.item(), [gradient.cpu() for gradient in grads if gradient is not None]


STORAGE_OPTIONS = {
    "as they come": ActivationOffload(),
    "on the host": ActivationOffload(is_on_host=True),
    "in a buffer": ActivationOffload(is_contiguous=True),
    "in a buffer on the host": ActivationOffload(is_on_host=True, is_contiguous=True),
}


@pytest.mark.parametrize("option", STORAGE_OPTIONS)
def test_recomputed_layers_match_stored_activations(option: str, torch_device: torch.device) -> None:
    """Losses to the bit, for forward is the same; gradients but for the order in which a GPU may add."""
    loss, expected = gradients_of_layers(torch_device, None, 0.2)
    for _ in range(2):  # the second time in memory that has been used
        recomputed_loss, grads = gradients_of_layers(
            torch_device, ActivationStorage(STORAGE_OPTIONS[option], lambda: (LAYERS, 1)), 0.2
        )
        assert recomputed_loss == loss
        assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(grads, expected, strict=True))
    undropped_loss, _ = gradients_of_layers(torch_device, None, 0.0)
    assert undropped_loss != loss, "something is dropped"


def test_recompute_inputs_are_stored_where_requested(torch_device: torch.device) -> None:
    x = torch.randn(ROWS, H, device=torch_device, requires_grad=True)
    for option in STORAGE_OPTIONS.values():
        storage = ActivationStorage(option, lambda: (2, 1))
        inputs = storage.store((x, 3))
        assert inputs.restore()[0] is x, "at first as it is"
        restored, restored_int = inputs.restore()
        assert restored_int == 3 and restored.device == x.device and restored.requires_grad
        assert torch.equal(restored.detach(), x.detach())
        stored = next(iter(storage._stored_inputs)).storage
        assert stored.device.type == ("cpu" if option.is_on_host else torch_device.type)
        assert stored.is_pinned() == (option.is_on_host and torch_device.type == "cuda")
        assert storage.stored_bytes() == x.nbytes


def test_copy_to_host_during_computation_keeps_values(torch_device: torch.device) -> None:
    """The source is freed at once, and its memory taken by others; the copy is asked for ahead of its end."""
    expected, host_copies = [], []
    for copy_idx in range(8):
        source = torch.full((1 << 18,), float(copy_idx), device=torch_device)
        target = device.host_memory((1 << 18,), torch.float32, torch_device)
        start_busy_work(torch_device)
        device.copy_to_host(target, source)
        del source
        expected.append(copy_idx)
        host_copies.append(target)
        torch.full((1 << 18,), -1.0, device=torch_device)
    assert [float(device.copy_from_host(host_copy, torch_device).mean()) for host_copy in host_copies] == expected


def test_staged_copy_keeps_values_at_copy_time(torch_device: torch.device) -> None:
    staging = StagingBuffer()
    tensors = [torch.full((1 << 16,), 1.0, device=torch_device), torch.arange(7, device=torch_device)]
    for round_ in range(3):
        tensors[0].add_(0 * start_busy_work(torch_device))  # is still under way when the copy is asked for
        records = [TensorRecord(str(i), tensor, Shard(tuple(tensor.shape))) for i, tensor in enumerate(tensors)]
        copied, num_bytes = staging.copy(records)
        for tensor in tensors:
            tensor.add_(1)
        assert num_bytes == sum(tensor.nbytes for tensor in tensors)
        assert {record.tensor.device.type for record in copied} == {"cpu"}
        assert torch.equal(copied[0].tensor, torch.full((1 << 16,), 1.0 + round_))
        assert torch.equal(copied[1].tensor, torch.arange(7) + round_)
        assert copied[0].tensor.is_pinned() == (torch_device.type == "cuda")

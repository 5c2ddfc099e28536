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


def pinned(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if place.type == "cuda" else tensor


def busy(place: torch.device) -> torch.Tensor:
    """Return what the device will only have done after some milliseconds."""
    size = 2048 if place.type == "cuda" else 64
    work = torch.full((size, size), 1.0 / size, device=place)
    for _ in range(20):
        work = work @ work
    return work.sum()


def test_every_micro_batch_comes_whole_while_the_device_computes(place: torch.device) -> None:
    sums, held = [], []
    for number in range(32):
        read = {"text": pinned(torch.full((256, 512), number), place), "more": pinned(torch.arange(number), place)}
        batch = Upload(read, place)
        waiting = busy(place)
        text = broadcast_data(["text", "more"], batch, torch.int64, SINGLE, place)
        assert {each.device.type for each in text.values()} == {place.type}
        sums.append(text["text"].sum() + text["more"].sum() + 0 * waiting.long())
        held.append(batch if number % 2 else None)  # the memory of others is given to later uploads
    wanted = [number * 256 * 512 + number * (number - 1) // 2 for number in range(32)]
    assert [int(each) for each in sums] == wanted


def test_a_batch_that_the_program_changes_is_copied_anew(place: torch.device) -> None:
    batch = Upload({"text": pinned(torch.arange(6), place), "more": pinned(torch.arange(3), place)}, place)
    batch["text"] = batch["text"][:2] + 5
    batch["more"][0] = 9
    found = broadcast_data(["text", "more"], batch, torch.int64, SINGLE, place)
    assert found["text"].tolist() == [5, 6] and found["more"].tolist() == [9, 1, 2]


def gradients_of_layers(
    place: torch.device, keeper: ActivationStorage | None, dropout: float
) -> tuple[float, list[torch.Tensor]]:
    """Return the loss of a stack of recomputed layers, and the gradients of its weights; ``keeper`` None: kept."""
    generator = torch.Generator().manual_seed(1)
    weights = [(torch.randn(H, H, generator=generator) / H**0.5).to(place).requires_grad_() for _ in range(LAYERS)]
    x = torch.randn(ROWS, H, generator=generator).to(place).requires_grad_()
    streams = DropoutStreams(5)

    def layer(number: int, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ weights[number])
        return x + streams.dropout(hidden, dropout, training=True, layer=number, site="here")

    for number in range(LAYERS):
        run = partial(layer, number)
        x = run(x) if keeper is None else checkpoint(streams, run, x, keeper=keeper)
    loss = x.square().mean()
    loss.backward()
    found = [weight.grad for weight in weights]
    assert all(gradient is not None for gradient in found)
    return loss.item(), [gradient.cpu() for gradient in found if gradient is not None]


HOW = {
    "as they come": ActivationOffload(),
    "on the host": ActivationOffload(is_on_host=True),
    "in a buffer": ActivationOffload(is_contiguous=True),
    "in a buffer on the host": ActivationOffload(is_on_host=True, is_contiguous=True),
}


@pytest.mark.parametrize("how", HOW)
def test_recomputed_layers_drop_alike_and_have_the_gradients_of_kept_ones(how: str, place: torch.device) -> None:
    """Losses to the bit, for forward is the same; gradients but for the order in which a GPU may add."""
    loss, wanted = gradients_of_layers(place, None, 0.2)
    for _ in range(2):  # the second time in memory that has been used
        again, found = gradients_of_layers(place, ActivationStorage(HOW[how], lambda: (LAYERS, 1)), 0.2)
        assert again == loss
        assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(found, wanted, strict=True))
    other, _ = gradients_of_layers(place, None, 0.0)
    assert other != loss, "something is dropped"


def test_inputs_of_recomputed_layers_wait_where_they_are_asked_to(place: torch.device) -> None:
    x = torch.randn(ROWS, H, device=place, requires_grad=True)
    for how in HOW.values():
        keeper = ActivationStorage(how, lambda: (2, 1))
        inputs = keeper.put_away((x, 3))
        assert inputs.take()[0] is x, "at first as it is"
        restored, other = inputs.take()
        assert other == 3 and restored.device == x.device and restored.requires_grad
        assert torch.equal(restored.detach(), x.detach())
        held = next(iter(keeper._waiting)).held
        assert held.device.type == ("cpu" if how.is_on_host else place.type)
        assert held.is_pinned() == (how.is_on_host and place.type == "cuda")
        assert keeper.waiting_bytes() == x.nbytes


def test_what_goes_to_the_host_beside_a_computation_is_what_it_was(place: torch.device) -> None:
    """The source is freed at once, and its memory taken by others; the copy is asked for ahead of its end."""
    wanted, held = [], []
    for number in range(8):
        source = torch.full((1 << 18,), float(number), device=place)
        target = device.host_memory((1 << 18,), torch.float32, place)
        busy(place)
        device.copy_to_host(target, source)
        del source
        wanted.append(number)
        held.append(target)
        torch.full((1 << 18,), -1.0, device=place)
    assert [float(device.copy_from_host(each, place).mean()) for each in held] == wanted


def test_a_copy_for_a_save_has_the_values_of_then_though_training_goes_on(place: torch.device) -> None:
    staging = StagingBuffer()
    tensors = [torch.full((1 << 16,), 1.0, device=place), torch.arange(7, device=place)]
    for round_ in range(3):
        tensors[0].add_(0 * busy(place))  # is still under way when the copy is asked for
        records = [TensorRecord(str(i), each, Shard(tuple(each.shape))) for i, each in enumerate(tensors)]
        copied, num_bytes = staging.copy(records)
        for each in tensors:
            each.add_(1)
        assert num_bytes == sum(each.nbytes for each in tensors)
        assert {record.tensor.device.type for record in copied} == {"cpu"}
        assert torch.equal(copied[0].tensor, torch.full((1 << 16,), 1.0 + round_))
        assert torch.equal(copied[1].tensor, torch.arange(7) + round_)
        assert copied[0].tensor.is_pinned() == (place.type == "cuda")

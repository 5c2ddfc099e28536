"""The first number that is not finite is traced to the module that made it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.debug.hooks import FiniteCheck, ModuleWatcher
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parameters import named_modules
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import fill_weights, make_batch

NAN = float("nan")


class NanGradient(torch.autograd.Function):
    """The identity, whose backward sends NaN."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad * NAN


class Block(nn.Module):
    """A residual block that can be spoiled in four places."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.fault = fault
        if fault == "weight":
            self.down.weight.data[1, 1] = NAN

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        if self.fault == "between":
            hidden = hidden / 0.0
        if self.fault == "between in backward":
            hidden = NanGradient.apply(hidden)
        y = self.down(hidden)
        return x + (NanGradient.apply(y) if self.fault == "in backward" else y)


def make_model(fault: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(""), Block(fault), Block(""))


def find_nonfinite(
    net: nn.Module,
    x: torch.Tensor,
    *,
    has_loss: bool = True,
    in_backward: bool = True,
    loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum,
    is_recomputed: bool = False,
):
    """Return the text of what was found in one forward and backward, None without."""
    check = FiniteCheck(has_loss)
    watcher = ModuleWatcher(net, named_modules(net), lambda: 2, check.record)
    watcher.start()
    loss(checkpoint(net, x, use_reentrant=False) if is_recomputed else net(x)).backward()
    watcher.stop()
    finding = check.first_nonfinite(in_backward=in_backward)
    return None if finding is None or finding.is_from_outside else finding.text


X = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize(
    "fault, message",
    [
        ("", None),
        ("weight", "1.down returned NaN or infinity in the forward of micro-batch 2, although its inputs were finite"),
        ("between", "first appeared between 1.up and 1.down in the forward of micro-batch 2, outside of any module"),
        (
            "between in backward",
            "first appeared between 1.down and 1.up in the backward of micro-batch 2, outside of any module",
        ),
        ("in backward", "first appeared between 1 and 1.down in the backward of micro-batch 2"),
    ],
)
def test_faulty_module_or_transition_is_named(fault: str, message: str | None, is_recomputed: bool) -> None:
    text = find_nonfinite(make_model(fault), X, is_recomputed=is_recomputed)
    assert text is message if message is None else message in str(text)


def test_module_gradient_fault_differs_from_accumulated_gradient() -> None:
    net = make_model("")
    net[1].norm.register_full_backward_hook(lambda *_: (torch.full((3, 2, 4), NAN),))
    message = find_nonfinite(net, X)
    assert message == (
        "1.norm returned a NaN or infinite input gradient in the backward of micro-batch 2, although its output "
        "gradients were finite"
    )
    assert find_nonfinite(net, X, in_backward=False) is None  # what an overflow of fp16 is


def test_incoming_nonfinite_values_are_ignored_and_loss_is_named() -> None:
    nonfinite_input = (X.detach() / 0.0).requires_grad_()
    assert find_nonfinite(make_model(""), nonfinite_input) is None
    assert find_nonfinite(make_model("weight"), nonfinite_input) is None

    def loss(y: torch.Tensor) -> torch.Tensor:
        return NanGradient.apply(y).sum()

    message = find_nonfinite(make_model(""), X, loss=loss)
    assert message == "the loss returned a NaN or infinite gradient to 2 in the backward of micro-batch 2"
    assert find_nonfinite(make_model(""), X, loss=loss, has_loss=False) is None


class ChunkedModel(nn.Module):
    """Two chunks, called as a pipeline's stage calls them; each passes on a second tensor that it takes."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.parts = nn.ModuleList([PassThroughChunk(fault), PassThroughChunk("")])

    def forward(self, inputs: tuple[torch.Tensor, ...], chunk: int = 0) -> tuple[torch.Tensor, ...]:
        return self.parts[chunk](inputs)


class PassThroughChunk(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.block, self.cross = Block(fault), nn.Linear(4, 4)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, memory = inputs
        return self.block(x) + self.cross(memory), memory


def find_in_chunk(
    chunk: int, inputs: tuple[torch.Tensor, ...], gradients: tuple[float, float], fault: str = ""
) -> tuple[bool, str]:
    """Return whether what was found has arrived, and its text, with gradients of such numbers for both outputs."""
    net = ChunkedModel(fault)
    check = FiniteCheck(has_loss=True, num_chunks=2)
    watcher = ModuleWatcher(net, named_modules(net), lambda: 0, check.record, chunk=lambda args: args[1])
    watcher.start()
    outputs = net(inputs, chunk)
    torch.autograd.backward(
        outputs, [torch.full_like(output, gradient) for output, gradient in zip(outputs, gradients, strict=True)]
    )
    watcher.stop()
    finding = check.first_nonfinite()
    assert finding is not None
    return finding.is_from_outside, finding.text


def test_nonfinite_chunk_inputs_are_ignored_and_only_last_chunk_checks_loss() -> None:
    memory = X.detach().clone().requires_grad_()
    has_arrived, message = find_in_chunk(1, (X, memory), (NAN, 1.0))
    assert not has_arrived and message.startswith("the loss returned a NaN or infinite gradient to parts.1")
    assert find_in_chunk(0, (X, memory), (NAN, 1.0))[0]
    assert find_in_chunk(0, (X, memory), (1.0, NAN))[0]  # of the tensor that it only passes on
    nonfinite_memory = (memory.detach() * NAN).requires_grad_()
    assert find_in_chunk(1, (X, nonfinite_memory), (1.0, 1.0))[0]
    has_arrived, message = find_in_chunk(0, (X, memory), (1.0, 1.0), "between")
    assert not has_arrived and "first appeared between parts.0.block.up and parts.0.block.down" in message


def test_no_hook_remains_on_tensors_returned_by_module() -> None:
    class StateModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.state = nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)

        def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
            return self.weight, self.state

    class AddingModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keeper = StateModule()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(self.keeper(), x)

    net = AddingModule()
    assert find_nonfinite(net, X) is None
    assert not net.keeper.weight._backward_hooks and not net.keeper.state._backward_hooks


def test_infinity_is_reported_and_evaluation_is_ignored() -> None:
    net = make_model("")
    net[1].down.bias.data[0] = float("inf")
    assert str(find_nonfinite(net, X)).startswith("1.down returned")
    assert find_nonfinite(net.eval(), X) is None


def test_first_product_of_gated_mlp_is_named() -> None:
    net = fill_weights(DecoderModel(llama_model_args()))
    tokens = make_batch().tokens
    assert find_nonfinite(net, tokens) is None
    net.layers[1].mlp.up.weight.data[0, 0] = NAN
    assert str(find_nonfinite(net, tokens)).startswith("layers.1.mlp.up returned NaN or infinity in the forward")

"""The first number that is not finite is traced to the module that made it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.debug.hooks import FiniteCheck, Watch
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parameters import named_modules
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import batch_of, filled

NAN = float("nan")


class Poisoned(torch.autograd.Function):
    """The identity, whose backward sends NaN."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad * NAN


class Block(nn.Module):
    """A residual block that can be spoiled in four places."""

    def __init__(self, spoiled: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.spoiled = spoiled
        if spoiled == "weight":
            self.down.weight.data[1, 1] = NAN

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        if self.spoiled == "between":
            hidden = hidden / 0.0
        if self.spoiled == "between in backward":
            hidden = Poisoned.apply(hidden)
        y = self.down(hidden)
        return x + (Poisoned.apply(y) if self.spoiled == "in backward" else y)


def model(spoiled: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(""), Block(spoiled), Block(""))


def finding(
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
    watch = Watch(net, named_modules(net), lambda: 2, check.see)
    watch.start()
    loss(checkpoint(net, x, use_reentrant=False) if is_recomputed else net(x)).backward()
    watch.stop()
    found = check.finding(in_backward=in_backward)
    return None if found is None or found.has_arrived else found.text


X = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize(
    "spoiled, message",
    [
        ("", None),
        ("weight", "1.down returned NaN or infinity in the forward of micro-batch 2, although its inputs were finite"),
        ("between", "arose between 1.up and 1.down in the forward of micro-batch 2, outside of modules"),
        ("between in backward", "arose between 1.down and 1.up in the backward of micro-batch 2, outside of modules"),
        ("in backward", "arose between 1 and 1.down in the backward of micro-batch 2"),
    ],
)
def test_the_module_or_the_way_between_two_is_named(spoiled: str, message: str | None, is_recomputed: bool) -> None:
    text = finding(model(spoiled), X, is_recomputed=is_recomputed)
    assert text is message if message is None else message in str(text)


def test_a_gradient_that_a_module_spoils_is_told_from_one_that_others_add() -> None:
    net = model("")
    net[1].norm.register_full_backward_hook(lambda *_: (torch.full((3, 2, 4), NAN),))
    message = finding(net, X)
    assert message == (
        "1.norm passed NaN or infinity back in the backward of micro-batch 2, although its incoming gradients were "
        "finite"
    )
    assert finding(net, X, in_backward=False) is None  # what an overflow of fp16 is


def test_what_has_arrived_is_nobodys_here_and_a_loss_is_named() -> None:
    spoiled = (X.detach() / 0.0).requires_grad_()
    assert finding(model(""), spoiled) is None
    assert finding(model("weight"), spoiled) is None

    def loss(y: torch.Tensor) -> torch.Tensor:
        return Poisoned.apply(y).sum()

    message = finding(model(""), X, loss=loss)
    assert message == "the loss passed NaN or infinity back to 2 in the backward of micro-batch 2"
    assert finding(model(""), X, loss=loss, has_loss=False) is None


class Chunks(nn.Module):
    """Two chunks, called as a pipeline's stage calls them; each passes on a second tensor that it takes."""

    def __init__(self, spoiled: str = "") -> None:
        super().__init__()
        self.parts = nn.ModuleList([Passing(spoiled), Passing("")])

    def forward(self, inputs: tuple[torch.Tensor, ...], chunk: int = 0) -> tuple[torch.Tensor, ...]:
        return self.parts[chunk](inputs)


class Passing(nn.Module):
    def __init__(self, spoiled: str) -> None:
        super().__init__()
        self.block, self.cross = Block(spoiled), nn.Linear(4, 4)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, memory = inputs
        return self.block(x) + self.cross(memory), memory


def found_in_chunk(
    chunk: int, inputs: tuple[torch.Tensor, ...], gradients: tuple[float, float], spoiled: str = ""
) -> tuple[bool, str]:
    """Return whether what was found has arrived, and its text, with gradients of such numbers for both outputs."""
    net = Chunks(spoiled)
    check = FiniteCheck(has_loss=True, chunks=2)
    watch = Watch(net, named_modules(net), lambda: 0, check.see, chunk=lambda args: args[1])
    watch.start()
    outputs = net(inputs, chunk)
    torch.autograd.backward(outputs, [torch.full_like(x, g) for x, g in zip(outputs, gradients, strict=True)])
    watch.stop()
    found = check.finding()
    assert found is not None
    return found.has_arrived, found.text


def test_what_comes_to_a_chunk_is_nobodys_and_the_loss_is_of_the_last_chunk_alone() -> None:
    memory = X.detach().clone().requires_grad_()
    has_arrived, message = found_in_chunk(1, (X, memory), (NAN, 1.0))
    assert not has_arrived and message.startswith("the loss passed NaN or infinity back to parts.1")
    assert found_in_chunk(0, (X, memory), (NAN, 1.0))[0]
    assert found_in_chunk(0, (X, memory), (1.0, NAN))[0]  # of the tensor that it only passes on
    spoiled = (memory.detach() * NAN).requires_grad_()
    assert found_in_chunk(1, (X, spoiled), (1.0, 1.0))[0]
    has_arrived, message = found_in_chunk(0, (X, memory), (1.0, 1.0), "between")
    assert not has_arrived and "arose between parts.0.block.up and parts.0.block.down" in message


def test_nothing_stays_on_a_tensor_that_a_module_keeps_and_returns() -> None:
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.state = nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)

        def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
            return self.weight, self.state

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keeper = Keeper()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(self.keeper(), x)

    net = Adding()
    assert finding(net, X) is None
    assert not net.keeper.weight._backward_hooks and not net.keeper.state._backward_hooks


def test_infinity_counts_and_an_evaluation_does_not() -> None:
    net = model("")
    net[1].down.bias.data[0] = float("inf")
    assert str(finding(net, X)).startswith("1.down gave")
    assert finding(net.eval(), X) is None


def test_the_first_product_of_a_gated_feed_forward_half_is_named() -> None:
    net = filled(DecoderModel(llama_sizes()))
    tokens = batch_of().tokens
    assert finding(net, tokens) is None
    net.layers[1].mlp.up.weight.data[0, 0] = NAN
    assert str(finding(net, tokens)).startswith("layers.1.mlp.up returned NaN or infinity in the forward")

"""A loss as a function of (outputs, labels), and as a last layer to which the labels travel: the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tds
from tds.p2p.boundary import Boundary
from tds.pipe import LayerSpec, PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine, train

VOCAB, WIDE, HEADS, LENGTH = 13, 8, 2, 5


class Layer(nn.Module):
    """Works on the first tensor and passes on what travels beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)

    def forward(self, given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return self.work(given)
        x, *others = given
        return self.work(x), *others

    def work(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Embedding(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.words, self.places = nn.Embedding(VOCAB, WIDE), nn.Embedding(LENGTH, WIDE)

    def work(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens) + self.places.weight


class Block(Layer):
    """GPT-2's: attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDE) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def work(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Head(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.norm, self.logits = nn.LayerNorm(WIDE), nn.Linear(WIDE, VOCAB, bias=False)

    def work(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


def loss_of(logits: torch.Tensor, labels: torch.Tensor, form: str) -> Any:
    """Return the loss in one of the forms that a loss function may return; labels below 0 do not count."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none")
    counted = (labels >= 0).sum()
    if form == "scalar":
        return each.sum() / counted
    weighted = tds.Weighted(each.sum(), counted)
    right = (logits.argmax(-1) == labels).sum()
    return weighted if form == "weighted" else {"right": right, "loss": weighted, "most": each.detach().max()}


class LossLayer(nn.Module):
    """The loss as the last layer: it takes the labels that have come through all stages."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> Any:
        logits, labels = given
        assert labels.dtype is torch.int64 and not labels.requires_grad
        return loss_of(logits, labels, self.form)


class Words(Toy):
    """A small GPT-2, with its loss as a function or as a layer."""

    def __init__(self, form: str, is_layer: bool, **more: Any) -> None:
        super().__init__(dtype=torch.float32, micro_batches=4, **more)
        self.form, self.is_layer = form, is_layer
        if is_layer:
            self.loss_fn = None  # type: ignore[assignment, method-assign]

    def specs(self) -> list[Any]:
        blocks = [LayerSpec(Block, 10 + i) for i in range(5)]
        layers = [LayerSpec(Embedding, 1), *blocks, LayerSpec(Head, 2)]
        return [*layers, LayerSpec(LossLayer, self.form)] if self.is_layer else layers

    def loss_fn(self, output: torch.Tensor, labels: torch.Tensor) -> Any:
        return loss_of(output, labels, self.form)

    def batch(self, index: int, wide_rows: int | None = None) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens, labels = torch.randint(0, VOCAB, (2, self.rows, LENGTH), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < 0.1 * (1 + index % 4)] = -1
        return ((tokens, labels), None) if self.is_layer else (tokens, labels)


def module_of(toy: Words, num_stages: int, chunks: int) -> PipelineModule:
    """Return the toy's module, the labels declared as whole numbers without a gradient."""
    module = PipelineModule(
        toy.specs(), num_stages=num_stages, loss_fn=toy.loss_fn, partition_method="uniform", chunks=chunks
    )
    module.boundary = [Boundary("hidden"), *([Boundary("labels", torch.int64)] if toy.is_layer else [])]
    return module


def _runs(rank: int, num_stages: int, forms: list[str], schedules: list[str]) -> list[Any]:
    """Return (form, as a layer, schedule, (loss, gradients, norm), other losses, evaluation) of each combination."""
    tds.init_distributed("gloo", verbose=False)
    found: list[Any] = []
    for is_layer in (False, True):
        for chunks in sorted({1 + (schedule == "interleaved") for schedule in schedules}):
            toy = Words(forms[0], is_layer)
            engine = make_engine(toy, num_stages, module=module_of(toy, num_stages, chunks))
            for schedule in (each for each in schedules if (each == "interleaved") == (chunks == 2)):
                engine.set_schedule(schedule)
                for form in forms:
                    toy.form = form
                    for layer in engine.module.modules():
                        if isinstance(layer, LossLayer):
                            layer.form = form
                    result = train(engine, toy)
                    evaluated = engine.eval_batch(iter(toy.batches()))
                    found.append((form, is_layer, schedule, result, engine.get_additional_losses(), evaluated))
    return found


def check(num_stages: int, forms: list[str], schedules: list[str]) -> None:
    """Compare every run of every rank with one process that trains with a loss function."""
    alone = {form: rest for form, _, _, *rest in run_ranks(1, _runs, 1, forms, ["1f1b"])[0][: len(forms)]}
    ranks = run_ranks(num_stages, _runs, num_stages, forms, schedules)
    for index in range(2 * len(forms) * len(schedules)):
        seen: set[str] = set()
        for found in ranks:
            form, is_layer, schedule, (loss, gradients, _), more, evaluated = found[index]
            (wanted_loss, wanted, _), wanted_more, wanted_evaluated = alone[form]
            about = f"{form}, {'layer' if is_layer else 'function'}, {schedule}"
            assert torch.equal(loss, wanted_loss), about
            assert more == wanted_more and evaluated == wanted_evaluated, about
            assert (set(more or {}) == {"right", "most"}) == (form == "dict"), about
            for name, gradient in gradients.items():
                assert torch.equal(gradient, wanted[name]), f"{about}: {name}"
            seen |= set(gradients)
        assert seen == set(wanted) and len(seen) == 2 + 5 * 12 + 3
    assert len({float(alone[form][0][0]) for form in ("scalar", "weighted") if form in alone}) == len(
        {"scalar", "weighted"} & set(forms)
    ), "the mean over tokens is not that over micro-batches"


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loss_as_the_last_layer_trains_to_the_bits_of_a_loss_function(num_stages: int) -> None:
    check(num_stages, ["scalar", "weighted", "dict"], ["1f1b"] if num_stages == 1 else ["1f1b", "zb-h1"])


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
def test_it_does_so_in_every_schedule(num_stages: int) -> None:
    schedules = ["1f1b", "gpipe", "zb-h1"] + (["interleaved"] if num_stages == 2 else [])
    check(num_stages, ["scalar", "weighted", "dict"], schedules)


def _without_loss(rank: int) -> str:
    toy = Words("scalar", False)
    engine = make_engine(toy, 1, module=PipelineModule(toy.specs(), num_stages=1))
    with pytest.raises(ValueError) as raised:
        engine.train_batch(iter(toy.batches()))
    return "\n".join([str(raised.value), *raised.value.__notes__])


def test_a_model_without_a_loss_is_told_of_both_ways() -> None:
    message = run_ranks(1, _without_loss)[0]
    assert 'the loss "loss" must be a single number, got a tensor of float32[3, 5, 13]' in message
    assert (
        "has no loss_fn" in message and "or add a last layer that takes the labels" in message
    )

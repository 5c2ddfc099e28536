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
from tests.helpers.toys import Toy, make_engine, train_batch

VOCAB, WIDTH, HEADS, SEQ_LENGTH = 13, 8, 2, 5


class Layer(nn.Module):
    """Works on the first tensor and passes on what travels beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)

    def forward(self, inputs: Any) -> Any:
        if isinstance(inputs, torch.Tensor):
            return self.transform(inputs)
        x, *passed_through = inputs
        return self.transform(x), *passed_through

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Embedding(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.words, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ_LENGTH, WIDTH)

    def transform(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens) + self.positions.weight


class Block(Layer):
    """GPT-2's: attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Head(Layer):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


def compute_loss(logits: torch.Tensor, labels: torch.Tensor, form: str) -> Any:
    """Return the loss in one of the forms that a loss function may return; labels below 0 do not count."""
    token_losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none")
    num_counted = (labels >= 0).sum()
    if form == "scalar":
        return token_losses.sum() / num_counted
    weighted = tds.Weighted(token_losses.sum(), num_counted)
    num_correct = (logits.argmax(-1) == labels).sum()
    return (
        weighted
        if form == "weighted"
        else {"right": num_correct, "loss": weighted, "most": token_losses.detach().max()}
    )


class LossLayer(nn.Module):
    """The loss as the last layer: it takes the labels that have come through all stages."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        logits, labels = inputs
        assert labels.dtype is torch.int64 and not labels.requires_grad
        return compute_loss(logits, labels, self.form)


class TinyGPT(Toy):
    """A small GPT-2, with its loss as a function or as a layer."""

    def __init__(self, form: str, is_layer: bool, **kwargs: Any) -> None:
        super().__init__(dtype=torch.float32, num_micro_batches=4, **kwargs)
        self.form, self.is_layer = form, is_layer
        if is_layer:
            self.loss_fn = None  # type: ignore[assignment, method-assign]

    def layer_specs(self) -> list[Any]:
        blocks = [LayerSpec(Block, 10 + i) for i in range(5)]
        layers = [LayerSpec(Embedding, 1), *blocks, LayerSpec(Head, 2)]
        return [*layers, LayerSpec(LossLayer, self.form)] if self.is_layer else layers

    def loss_fn(self, output: torch.Tensor, labels: torch.Tensor) -> Any:
        return compute_loss(output, labels, self.form)

    def make_batch(self, idx: int, num_rows: int | None = None) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(idx)
        tokens, labels = torch.randint(0, VOCAB, (2, self.micro_batch_size, SEQ_LENGTH), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < 0.1 * (1 + idx % 4)] = -1
        return ((tokens, labels), None) if self.is_layer else (tokens, labels)


def build_module(toy: TinyGPT, num_stages: int, chunks: int) -> PipelineModule:
    """Return the toy's module, the labels declared as whole numbers without a gradient."""
    module = PipelineModule(
        toy.layer_specs(), num_stages=num_stages, loss_fn=toy.loss_fn, partition_method="uniform", chunks=chunks
    )
    module.boundary = [Boundary("hidden"), *([Boundary("labels", torch.int64)] if toy.is_layer else [])]
    return module


def _run_combinations(rank: int, num_stages: int, forms: list[str], schedules: list[str]) -> list[Any]:
    """Return (form, as a layer, schedule, (loss, gradients, norm), other losses, evaluation) of each combination."""
    tds.init_distributed("gloo", verbose=False)
    results: list[Any] = []
    for is_layer in (False, True):
        for chunks in sorted({1 + (schedule == "interleaved") for schedule in schedules}):
            toy = TinyGPT(forms[0], is_layer)
            engine = make_engine(toy, num_stages, module=build_module(toy, num_stages, chunks))
            for schedule in (candidate for candidate in schedules if (candidate == "interleaved") == (chunks == 2)):
                engine.set_schedule(schedule)
                for form in forms:
                    toy.form = form
                    for layer in engine.module.modules():
                        if isinstance(layer, LossLayer):
                            layer.form = form
                    result = train_batch(engine, toy)
                    evaluated = engine.eval_batch(iter(toy.make_batches()))
                    results.append((form, is_layer, schedule, result, engine.get_additional_losses(), evaluated))
    return results


def check_combinations(num_stages: int, forms: list[str], schedules: list[str]) -> None:
    """Compare every run of every rank with one process that trains with a loss function."""
    reference = {
        form: values for form, _, _, *values in run_ranks(1, _run_combinations, 1, forms, ["1f1b"])[0][: len(forms)]
    }
    ranks = run_ranks(num_stages, _run_combinations, num_stages, forms, schedules)
    for index in range(2 * len(forms) * len(schedules)):
        seen: set[str] = set()
        for results in ranks:
            form, is_layer, schedule, (loss, gradients, _), additional, evaluated = results[index]
            (expected_loss, expected, _), expected_additional, expected_evaluated = reference[form]
            case = f"{form}, {'layer' if is_layer else 'function'}, {schedule}"
            assert torch.equal(loss, expected_loss), case
            assert additional == expected_additional and evaluated == expected_evaluated, case
            assert (set(additional or {}) == {"right", "most"}) == (form == "dict"), case
            for name, gradient in gradients.items():
                assert torch.equal(gradient, expected[name]), f"{case}: {name}"
            seen |= set(gradients)
        assert seen == set(expected) and len(seen) == 2 + 5 * 12 + 3
    assert len({float(reference[form][0][0]) for form in ("scalar", "weighted") if form in reference}) == len(
        {"scalar", "weighted"} & set(forms)
    ), "the mean over tokens is not that over micro-batches"


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_loss_layer_equals_loss_function(num_stages: int) -> None:
    check_combinations(num_stages, ["scalar", "weighted", "dict"], ["1f1b"] if num_stages == 1 else ["1f1b", "zb-h1"])


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
def test_loss_layer_equals_loss_function_in_every_schedule(num_stages: int) -> None:
    schedules = ["1f1b", "gpipe", "zb-h1"] + (["interleaved"] if num_stages == 2 else [])
    check_combinations(num_stages, ["scalar", "weighted", "dict"], schedules)


def _train_without_loss(rank: int) -> str:
    toy = TinyGPT("scalar", False)
    engine = make_engine(toy, 1, module=PipelineModule(toy.layer_specs(), num_stages=1))
    with pytest.raises(ValueError) as raised:
        engine.train_batch(iter(toy.make_batches()))
    return "\n".join([str(raised.value), *raised.value.__notes__])


def test_missing_loss_error_names_both_options() -> None:
    message = run_ranks(1, _train_without_loss)[0]
    assert 'the loss "loss" must be a single number, got a tensor of float32[3, 5, 13]' in message
    assert "has no loss_fn" in message and "or add a last layer that takes the labels" in message

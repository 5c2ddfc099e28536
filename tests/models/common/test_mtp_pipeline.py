"""Multi-token prediction as pipeline layers, in one process: the losses, gradients and names of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.masks import Masks
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.mtp import MTPInput
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import named_modules
from megatron.models.common.pipeline import DecoderPipe, TiedTable, layer_specs
from megatron.models.common.transformer import Recompute
from megatron.ops.attention import positions_in_segments
from tds.pipe import TiedLayerSpec
from tests.helpers.model_samples import fill_weights, make_full_weight
from tests.models.common.test_mtp import FIELDS, make_text


class Stages(nn.Module):
    """The layers of a pipeline, built in one process; the last stage has a copy of the word embedding."""

    logical_name = DecoderPipe.logical_name
    _logits = DecoderPipe._logits
    token_losses = None

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.model_args, self.parallel = args, ParallelContext()
        self.masks = Masks(args, self.parallel)
        self._stage_recompute = Recompute(args, self.parallel)
        self.functions: list[Any] = []
        copy = TiedTable(args, self.parallel)
        self.copy = copy
        for idx, spec in enumerate(layer_specs(args, self.parallel, has_positions=True, masks=self.masks)):
            if isinstance(spec, TiedLayerSpec) and idx:
                self.functions.append(partial(spec.forward_fn, copy))
                continue
            module = spec.build()
            self.add_module(str(idx), module)
            self.functions.append(module)

    def loss(self, inputs: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...]) -> Any:
        output: Any = inputs
        for function in self.functions:
            # recompute passes the elements of a tuple, whose type is lost
            output = function(tuple(output) if isinstance(output, MTPInput) else output)
        return DecoderPipe._loss(self, output, labels)  # type: ignore[arg-type]


def fill_stages(stages: Stages) -> Stages:
    with torch.no_grad():
        for local_name, parameter in stages.double().named_parameters():
            name = "embedding.word.weight" if local_name.startswith("copy.") else stages.logical_name(local_name)
            parameter.copy_(make_full_weight(name, tuple(parameter.shape)))
    return stages


@pytest.mark.parametrize(
    "changes",
    [{}, {"untie_embeddings": True, "loss_chunk_tokens": 4}, {"checkpoint_activations": True}, {"z_loss": 0.1}],
    ids=str,
)
def test_losses_and_gradients_match_model(changes: dict[str, Any]) -> None:
    args = ModelArgs(**{**FIELDS, **changes})
    model, stages = fill_weights(DecoderModel(args).double()), fill_stages(Stages(args))
    text, documents, mask = make_text()
    segments = documents[:, :-1].contiguous()
    positions = positions_in_segments(segments)
    expected = model(text[:, :-1], positions, segments, text[:, 1:], mask)
    actual = stages.loss((text[:, :-1], segments, positions), (text[:, 1:], mask))
    assert list(actual) == list(expected)
    for name, (loss_sum, count) in expected.items():
        assert torch.equal(actual[name].total, loss_sum) and torch.equal(actual[name].count, count), name
    expected["loss"][0].backward()
    actual["loss"].total.backward()
    gradients: dict[str, torch.Tensor] = {}
    for local_name, parameter in stages.named_parameters():
        name = "embedding.word.weight" if local_name.startswith("copy.") else stages.logical_name(local_name)
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, local_name
        gradients[name] = gradients.get(name, torch.zeros(())) + parameter.grad  # both copies of the embedding
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-13 * parameter.grad.abs().max().clamp(min=1), name


def test_evaluation_has_the_main_loss_only() -> None:
    args = ModelArgs(**FIELDS)
    stages = fill_stages(Stages(args))
    text, documents, mask = make_text()
    segments = documents[:, :-1].contiguous()
    inputs, labels = (text[:, :-1], segments, positions_in_segments(segments)), (text[:, 1:], mask)
    with torch.no_grad():
        evaluated = stages.loss(inputs, labels)
    assert torch.equal(evaluated.total, stages.loss(inputs, labels)["loss"].total)


def test_modules_have_the_names_of_the_model() -> None:
    args = ModelArgs(**{**FIELDS, "untie_embeddings": True})
    names = {name for name, _ in named_modules(Stages(args))}
    expected = {name for name, _ in named_modules(DecoderModel(args))}
    assert {name for name in names if name.startswith("mtp.")} == {n for n in expected if n.startswith("mtp.")}
    assert {"embedding.word", "layers.1.mlp", "final_norm", "head"} <= names


def test_norm_passes_documents_and_positions_on() -> None:
    args = ModelArgs(**FIELDS)
    (norm,) = (spec.build() for spec in layer_specs(args, ParallelContext(), True)[args.num_layers + 1 :][:1])
    x, segments, positions = torch.ones(2, 1, 12), torch.zeros(1, 2), torch.ones(1, 2)
    passed = norm((x, segments, positions))
    assert isinstance(passed, MTPInput)
    assert passed.x.shape == x.shape and passed.segment_ids is segments and passed.positions is positions
    assert passed.layers == ()

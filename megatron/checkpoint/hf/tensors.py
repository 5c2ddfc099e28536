"""All tensors of a model under either names, checked against those that it must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from megatron.checkpoint.hf.form import NOTHING, Tensors
from megatron.checkpoint.hf.forms import form_of
from megatron.checkpoint.naming import named_parameters
from megatron.config import Config
from megatron.errors import CheckpointError

_ROWS_AT_ONCE = 4096


class Readable(Protocol):
    """A tensor, or one in a file, of which no more is read than is indexed."""

    @property
    def shape(self) -> Any: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


Named = TypeVar("Named", bound=Readable)


def build_model(config: Config) -> torch.nn.Module:
    """Return the model of ``config`` without dropout, in one piece; its weights are not initialised."""
    model = replace(config.model, make_vocab_size_divisible_by=1, hidden_dropout=0.0, attention_dropout=0.0)
    try:
        return form_of(config.family).build(model, config)
    except ValueError as error:
        raise CheckpointError(f"no model has these sizes: {error}") from error


def to_theirs(weights: Mapping[str, torch.Tensor], config: Config) -> Tensors:
    """Return the tensors of a Hugging Face file with our ``weights``: copies of a tied table are left out.

    Raises:
        CheckpointError: listing every weight that is missing, unknown, or of another shape than ``config`` says.
    """
    require_own("the checkpoint", weights, config)
    return _to_theirs(weights, config)


def to_ours(tensors: Mapping[str, torch.Tensor], config: Config) -> Tensors:
    """Return our weights from the ``tensors`` of a Hugging Face file.

    Raises:
        CheckpointError: listing every tensor that is missing, unknown, or of another shape than ``config`` says; a
            copy of the word table differs from it.
    """
    ours, known = form_of(config.family).to_ours(checked(tensors, config), config), own(config)
    return {name: tensor for name, tensor in ours.items() if name in known}


def checked(tensors: Mapping[str, Named], config: Config) -> dict[str, Named]:
    """Return the ``tensors`` of a Hugging Face folder by their full names, each once, if they are those of the model.

    Raises:
        CheckpointError: as ``to_ours``.
    """
    form = form_of(config.family)
    theirs, expected = _named(tensors, config), _to_theirs(own(config), config)
    if config.model.untie_embeddings and form.head not in theirs and form.word in theirs:
        theirs[form.head] = theirs[form.word]  # transformers 5 leaves out a head that equals the table
    _check("the Hugging Face folder", theirs, expected)
    return theirs


def require_own(what: str, weights: Mapping[str, torch.Tensor], config: Config) -> None:
    """Check that ``weights`` are those of our model of ``config``, no more and no less.

    Raises:
        CheckpointError: listing every weight of ``what`` that is missing, unknown, or of another shape.
    """
    _check(what, weights, own(config))


def without_zero_biases(tensors: Mapping[str, Readable], config: Config) -> Config:
    """Return ``config`` as it is, or with biases where it says that there are none and some are not zero."""
    biases = form_of(config.family).biases
    if config.model.hidden_bias or biases is NOTHING:
        return config
    has_biases = any(
        bool(tensor[:].any()) for name, tensor in _named(tensors, config).items() if biases.fullmatch(name)
    )
    return replace(config, model=replace(config.model, hidden_bias=has_biases))


def _named(tensors: Mapping[str, Named], config: Config) -> dict[str, Named]:
    """Return ``tensors`` with their full names, each once, without what no model reads."""
    form = form_of(config.family)
    is_short = form.word.removeprefix(form.short) in tensors if form.short else False
    theirs = {f"{form.short}{name}" if is_short and name != form.head else name: t for name, t in tensors.items()}
    theirs = {name: t for name, t in theirs.items() if not form.unread.fullmatch(name)}
    theirs = {full: t for name, t in theirs.items() if (full := form.named(name, config)) is not None}
    for name in _copies(config):
        copy = theirs.pop(name, None)
        if copy is not None and not _equal(copy, theirs.setdefault(form.word, copy)):
            raise CheckpointError(
                f"{name} must equal {form.word}, of which config.json calls it a copy "
                "(tie_word_embeddings), and holds other values"
            )
    return theirs


def _copies(config: Config) -> tuple[str, ...]:
    """Return their names of what is the word table once more."""
    form = form_of(config.family)
    return (*form.copies, *(() if config.model.untie_embeddings else (form.head,)))


def _equal(one: Readable, other: Readable) -> bool:
    """Compare a block of rows after another, so that neither need be in memory."""
    return tuple(one.shape) == tuple(other.shape) and all(
        (a := one[at : at + _ROWS_AT_ONCE]).dtype == (b := other[at : at + _ROWS_AT_ONCE]).dtype and torch.equal(a, b)
        for at in range(0, one.shape[0], _ROWS_AT_ONCE)
    )


def own(config: Config) -> Tensors:
    """Return our weights without values."""
    with torch.device("meta"):
        return {name: parameter.detach() for name, parameter in named_parameters(build_model(config))}


def _to_theirs(weights: Mapping[str, torch.Tensor], config: Config) -> Tensors:
    theirs = form_of(config.family).from_ours(dict(weights), config)
    return {name: tensor for name, tensor in theirs.items() if name not in _copies(config)}


def _check(what: str, found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    problems = [f"{name}: missing" for name in expected if name not in found]
    problems += [f"{name}: no such tensor in this model" for name in found if name not in expected]
    problems += [
        f"{name}: {list(found[name].shape)}, by the sizes of the model {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and tuple(found[name].shape) != tuple(tensor.shape)
    ]
    if problems:
        raise CheckpointError(f"{what} does not hold this model ({len(problems)} tensors): " + "; ".join(problems))

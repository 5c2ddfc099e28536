"""All tensors of a model under either names, checked against those that it must have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron.checkpoint.hf import gpt2, t5
from megatron.checkpoint.naming import named_parameters
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.model import GPT2Model, T5Model, sizes_from, t5_sizes_from

Tensors = dict[str, torch.Tensor]
_WORD = {"gpt2": "transformer.wte.weight", "t5": "shared.weight"}
_COPIES = {"gpt2": (), "t5": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")}
_HEAD = "lm_head.weight"
_UNREAD = {
    "gpt2": re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias"),
    "t5": re.compile(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
}
"""What old files hold and no model reads."""
_BIASES = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.c_\w+\.bias")
"""Those that a GPT-2 of ours may lack, and theirs has."""
_LAYER_WEIGHT = re.compile(r"layers\.\d+\..+\.weight")


def build_model(config: Config) -> torch.nn.Module:
    """Return the model of ``config`` without dropout, in one piece; its weights are not initialised."""
    model = replace(config.model, make_vocab_size_divisible_by=1, hidden_dropout=0.0, attention_dropout=0.0)
    try:
        if config.is_t5:
            return T5Model(t5_sizes_from(model, config.t5))
        return GPT2Model(sizes_from(model))
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
    theirs, expected = _named(tensors, config), _to_theirs(_own(config), config)
    if config.model.untie_embeddings and _HEAD not in theirs and (word := theirs.get(_WORD[config.family])) is not None:
        theirs[_HEAD] = word.clone()  # transformers 5 leaves out a head that equals the table
    _check("the Hugging Face folder", theirs, expected)
    heads = config.model.num_attention_heads
    if config.is_t5:
        return t5.to_ours(theirs, heads, is_untied=config.model.untie_embeddings)
    ours = gpt2.to_ours(theirs, heads)
    if config.model.untie_embeddings:
        ours.setdefault("head.weight", theirs[_HEAD].clone())
    own = _own(config)
    return {name: tensor for name, tensor in ours.items() if name in own}


def require_own(what: str, weights: Mapping[str, torch.Tensor], config: Config) -> None:
    """Check that ``weights`` are those of our model of ``config``, no more and no less.

    Raises:
        CheckpointError: listing every weight of ``what`` that is missing, unknown, or of another shape.
    """
    _check(what, weights, _own(config))


def without_zero_biases(tensors: Mapping[str, torch.Tensor], config: Config) -> Config:
    """Return ``config`` as it is, or with biases where it says that there are none and some are not zero."""
    if config.is_t5 or config.model.hidden_bias:
        return config
    has_biases = any(bool(tensor.any()) for name, tensor in _named(tensors, config).items() if _BIASES.fullmatch(name))
    return replace(config, model=replace(config.model, hidden_bias=has_biases))


def _named(tensors: Mapping[str, torch.Tensor], config: Config) -> Tensors:
    """Return ``tensors`` with their full names, each once, without what no model reads."""
    is_short = not config.is_t5 and "wte.weight" in tensors  # as the hub's GPT-2 files
    theirs = {f"transformer.{name}" if is_short and name != _HEAD else name: t for name, t in tensors.items()}
    theirs = {name: t for name, t in theirs.items() if not _UNREAD[config.family].fullmatch(name)}
    copies = (*_COPIES[config.family], *(() if config.model.untie_embeddings else (_HEAD,)))
    for name in copies:
        copy = theirs.pop(name, None)
        if copy is not None and not _equal(copy, theirs.setdefault(_WORD[config.family], copy)):
            raise CheckpointError(
                f"{name} must equal {_WORD[config.family]}, of which config.json calls it a copy "
                "(tie_word_embeddings), and holds other values"
            )
    return theirs


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _own(config: Config) -> Tensors:
    """Return our weights without values."""
    with torch.device("meta"):
        return {name: parameter.detach() for name, parameter in named_parameters(build_model(config))}


def _to_theirs(weights: Mapping[str, torch.Tensor], config: Config) -> Tensors:
    heads = config.model.num_attention_heads
    if config.is_t5:
        theirs = t5.from_ours(dict(weights), heads)
    else:
        theirs = gpt2.from_ours({**weights, **_zero_biases(weights, config)}, heads)
    copies = (*_COPIES[config.family], *(() if config.model.untie_embeddings else (_HEAD,)))
    return {name: tensor for name, tensor in theirs.items() if name not in copies}


def _zero_biases(weights: Mapping[str, torch.Tensor], config: Config) -> Tensors:
    if config.model.hidden_bias:
        return {}
    names = {name: f"{name.removesuffix('weight')}bias" for name in weights if _LAYER_WEIGHT.fullmatch(name)}
    return {
        bias: weights[name].new_zeros(weights[name].shape[0]) for name, bias in names.items() if bias not in weights
    }


def _check(what: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    problems = [f"{name}: missing" for name in expected if name not in found]
    problems += [f"{name}: no such tensor in this model" for name in found if name not in expected]
    problems += [
        f"{name}: {list(found[name].shape)}, by the sizes of the model {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if problems:
        raise CheckpointError(f"{what} does not hold this model ({len(problems)} tensors): " + "; ".join(problems))

"""Do our model and Hugging Face's give the same logits on the same tokens?

Both compute in fp64 without dropout. GPT-2 and BERT then agree to 1e-13 or so of the largest logit; where their model
computes a part in fp32 (T5's and LLaMA's norms, LLaMA's angles, MPT's softmax), 1e-7 is what there can be. ``allowed``
of each family's ``Form`` says what is let pass.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.hf import settings, tensors
from megatron.checkpoint.hf.export import DTYPES
from megatron.checkpoint.hf.forms import form_of
from megatron.checkpoint.loading import Checkpoint
from megatron.checkpoint.whole import read_weights
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError

_ROWS, _LENGTH = 2, 24


def require_transformers() -> None:
    """Check that ``transformers`` can be imported.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError('--verify needs the transformers library. Run: pip install -e ".[hf]"')


def verify(checkpoint: Checkpoint, folder: Path, *, dtype: str | None = None, seed: int = 0) -> float:
    """Return the largest difference of a logit as part of the largest, between ``checkpoint`` and ``folder``.

    Args:
        dtype: what our weights are rounded to first, as in the export; None: not.

    Raises:
        CheckpointError: the difference is more than rounding.
        ConfigError: ``transformers`` is not installed.
    """
    require_transformers()
    config = settings.saved_config(checkpoint.state)
    tokens = _batch(config, seed)
    with torch.no_grad():
        ours = _our_logits(checkpoint, config, dtype, tokens)
        theirs = _their_logits(folder, config, tokens)
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    allowed = form_of(config.family).allowed
    if not difference <= allowed:  # NaN too
        raise CheckpointError(
            f"our logits and those of {folder} must agree to {allowed:.0e} of the largest, got "
            f"{difference:.1e}: do not use the folder, and report the command"
        )
    return difference


def _batch(config: Config, seed: int) -> torch.Tensor:
    """Return tokens [b, s] that both models can read."""
    rng = torch.Generator().manual_seed(seed)
    length = min(_LENGTH, config.model.max_position_embeddings or _LENGTH)
    return torch.randint(0, config.model.vocab_size or 0, (_ROWS, length), generator=rng)


def _our_logits(checkpoint: Checkpoint, config: Config, dtype: str | None, tokens: torch.Tensor) -> torch.Tensor:
    weights = {name: t if dtype is None else t.to(DTYPES[dtype]) for name, t in read_weights(checkpoint).items()}
    with torch.device("meta"):
        model = tensors.build_model(config)
    model.to_empty(device="cpu")
    model.double().eval().load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    return form_of(config.family).our_logits(model, tokens)  # [b, s, v]


def _their_logits(folder: Path, config: Config, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    form = form_of(config.family)
    kind = getattr(transformers, form.auto if isinstance(form.auto, str) else form.auto(config))
    loaded: Any = kind.from_pretrained(folder, dtype=torch.float64, local_files_only=True, output_loading_info=True)
    model, told = loaded
    odd = {what: sorted(told[what]) for what in ("missing_keys", "unexpected_keys", "mismatched_keys") if told[what]}
    if odd:
        raise CheckpointError(f"transformers must find each tensor of its model in {folder}, got {odd}")
    model.eval()
    form.prepare(model, config)
    return form.their_logits(model(**form.their_inputs(tokens)))

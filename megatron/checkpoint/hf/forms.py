"""The Hugging Face forms of the families."""

from __future__ import annotations

from megatron.checkpoint.hf.form import Form
from megatron.errors import CheckpointError
from megatron.models.registry import FAMILIES, has_part, load


def form_of(family: str) -> Form:
    """Return the form of ``family`` there.

    Raises:
        CheckpointError: it has none.
    """
    known = with_forms()
    if family not in known:
        title = FAMILIES[family].title if family in FAMILIES else family
        have = ", ".join(FAMILIES[name].title for name in known)
        raise CheckpointError(f"{title} has no Hugging Face form here; {have} have one")
    form: Form = load(family, "huggingface").FORM
    return form


def with_forms() -> list[str]:
    """Return the families that have a form there."""
    return [family for family in FAMILIES if has_part(family, "huggingface")]


def family_by_type() -> dict[str, str]:
    """Return their model_type -> our family."""
    return {kind: family for family in with_forms() for kind in form_of(family).model_types}

"""The families that have a Hugging Face form: a family is a line."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.checkpoint.hf import bert, gpt2, llama, mpt, t5
from megatron.checkpoint.hf.form import Form
from megatron.config.option import FAMILIES
from megatron.errors import CheckpointError

FORMS: Mapping[str, Form] = {
    "gpt2": gpt2.FORM,
    "t5": t5.FORM,
    "llama": llama.FORM,
    "mpt": mpt.FORM,
    "bert": bert.FORM,
}
"""Our family -> its form there."""

FAMILY: Mapping[str, str] = {kind: family for family, form in FORMS.items() for kind in form.model_types}
"""Their model_type -> our family."""


def form_of(family: str) -> Form:
    """Return the form of ``family`` there.

    Raises:
        CheckpointError: it has none.
    """
    if family not in FORMS:
        known = ", ".join(FAMILIES[name] for name in FORMS)
        raise CheckpointError(f"{FAMILIES.get(family, family)} has no Hugging Face form here; {known} have one")
    return FORMS[family]

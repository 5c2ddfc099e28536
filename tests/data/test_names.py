from __future__ import annotations

import importlib

import pytest

from megatron import data


def test_names_of_bert_and_t5_are_found_where_they_were_and_their_home_is_told() -> None:
    for name, there in data._FORMER.items():
        assert name not in data.__all__
        with pytest.warns(DeprecationWarning, match=rf"megatron\.data\.{name} is {there} now"):
            found = getattr(data, name)
        home, _, its_name = there.rpartition(".")
        assert found is getattr(importlib.import_module(home), its_name)
    with pytest.raises(AttributeError, match="no attribute 'T6Samples'"):
        data.T6Samples  # noqa: B018

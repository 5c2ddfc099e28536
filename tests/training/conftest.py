"""The repository's texts as token files, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))

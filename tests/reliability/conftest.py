from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of tokenized texts."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))

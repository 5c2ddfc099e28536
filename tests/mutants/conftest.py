from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mutants.killing import ROOT
from tests.mutants.runner import Runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(ROOT, tmp_path_factory.mktemp("mutants")) as made:
        yield made

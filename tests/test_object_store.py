"""What an object store answers about a file or folder that has changed since it was listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron import object_store
from megatron.errors import DataError
from tests.helpers.fake_store import cache_listings, make_empty_store

FOLDER, FILE = "memory://b/run", "memory://b/run/one"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    """A store that answers from a cache of listings, as s3fs does; ``pipe`` writes as another process would."""
    filesystem = make_empty_store(monkeypatch)
    cache_listings(monkeypatch)
    return filesystem


QUERIES: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "sizes_below": (lambda: object_store.sizes_below(FOLDER), [{}, {("one",): 2}, {("one",): 3, ("two",): 1}]),
    "files_below": (
        lambda: [names for names, _ in object_store.files_below(FOLDER)],
        [[], [("one",)], [("one",), ("two",)]],
    ),
    "size_of": (lambda: object_store.size_of(FILE), [None, 2, 3]),
    "version": (lambda: object_store.version(FILE)[0], [None, 2, 3]),
}
"""By function: what is asked of it, and its answers for an empty folder, for one file, and for two."""


@pytest.mark.parametrize("function", QUERIES)
def test_queries_ignore_cached_listings(store: MemoryFileSystem, function: str) -> None:
    query, (when_empty, with_one_file, with_two_files) = QUERIES[function]
    if when_empty is None and function != "size_of":
        with pytest.raises(DataError, match="does not exist"):
            query()
    else:
        assert query() == when_empty
    store.pipe("/b/run/one", b"12")
    assert query() == with_one_file
    store.pipe("/b/run/one", b"123")
    store.pipe("/b/run/two", b"4")
    assert query() == with_two_files


def test_upload_verifies_size_despite_cached_listing(store: MemoryFileSystem, tmp_path: Path) -> None:
    store.pipe("/b/run/one", b"12")
    store.info("/b/run/one")  # cached with 2 bytes
    (tmp_path / "file").write_bytes(b"12345")
    object_store.upload(tmp_path / "file", FILE)

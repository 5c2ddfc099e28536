"""What a forked rank of the test suite must not take over from the process that runs the tests."""

from __future__ import annotations

import gc

from tests.helpers.harness import run_ranks


def compile_in_rank(rank: int) -> tuple[str, int]:
    """Return what the compiler's pool of threads made, and how many objects no collection goes over."""
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile.pool().submit(str, rank).result(timeout=30), gc.get_freeze_count()


def test_forked_rank_compiles_and_freezes_parent_objects() -> None:
    import torch._inductor.config

    with torch._inductor.config.patch(compile_threads=2):
        from torch._inductor.async_compile import AsyncCompile

        assert AsyncCompile.pool().submit(str, "idle").result() == "idle"
        output, num_frozen = run_ranks(1, compile_in_rank, init=False, deadline_s=60.0)[0]
    AsyncCompile.pool.cache_clear()
    assert output == "0" and num_frozen > 100_000

"""What the console says beside its table and progress lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megatron.training import start_table
from megatron.training.callbacks import console
from megatron.training.callbacks.console import Console
from tests.helpers.runs import flags, train_ranks, write_corpus


def test_what_products_have_added_is_said_once_with_what_autograd_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(console.log, "info", said.append)
    monkeypatch.setattr(console.data_progress, "epochs_text", lambda *_: "")
    monkeypatch.setattr(console, "progress_line", lambda *_: "")
    module = nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 1, bias=False))
    engine = SimpleNamespace(
        module=module, optimizer=SimpleNamespace(reducer=SimpleNamespace(fused_params={module[0].weight}))
    )
    progress = SimpleNamespace(step=1, samples_consumed=1)
    each: Any = Console("plain", 2, [])
    each.trainer = SimpleNamespace(engine=engine, data=None, progress=progress, last_step=2, print_line=lambda _: None)
    each._says_what_is_fused = True
    for _ in range(2):
        each.on_log({})
    assert said == [
        "--gradient-accumulation-fusion: matrix products accumulate the gradients of 81.8 % of the weights on this "
        "rank; autograd accumulates those of 0.bias, 1.weight"
    ]
    assert start_table.fusion_text(module, set(module.parameters())).endswith("of 100.0 % of the weights on this rank")


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "is_said"), [("--gradient-accumulation-fusion", True), ("", False)])
def test_a_run_says_it_in_its_first_logged_step(tmp_path: Path, extra: str, is_said: bool) -> None:
    def plant(rank: int) -> None:
        fusion_text = console.start_table.fusion_text

        def noted(*args: Any) -> str:
            text = fusion_text(*args)
            with (tmp_path / "said").open("a") as file:
                file.write(text + "\n")
            return text

        console.start_table.fusion_text = noted  # type: ignore[assignment]

    steps = f"--train-iters 4 --log-interval 2 --eval-iters 0 --gas 2 {extra}"
    codes, _ = train_ranks(1, flags(write_corpus(tmp_path), tmp_path / "run", steps), plant)
    assert codes == [0]
    said = (tmp_path / "said").read_text().splitlines() if (tmp_path / "said").exists() else []
    assert len(said) == is_said
    if is_said:
        assert "products accumulate the gradients of 9" in said[0] and "position" in said[0], said

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
from tests.helpers.runs import make_flags, train_ranks, write_corpus


def test_fused_gradient_share_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(console.log, "info", messages.append)
    monkeypatch.setattr(console.data_progress, "epochs_text", lambda *_: "")
    monkeypatch.setattr(console, "progress_line", lambda *_: "")
    module = nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 1, bias=False))
    engine = SimpleNamespace(
        module=module, optimizer=SimpleNamespace(reducer=SimpleNamespace(fused_params={module[0].weight}))
    )
    progress = SimpleNamespace(step=1, samples_consumed=1)
    callback: Any = Console("plain", 2, [])
    callback.trainer = SimpleNamespace(
        engine=engine, data=None, progress=progress, last_step=2, print_line=lambda _: None
    )
    callback._should_log_fusion = True
    for _ in range(2):
        callback.on_log({})
    assert messages == [
        "--gradient-accumulation-fusion: matrix products accumulate the gradients of 81.8 % of the weights on this "
        "rank; autograd accumulates the gradients of 0.bias, 1.weight"
    ]
    assert start_table.fusion_text(module, set(module.parameters())).endswith("of 100.0 % of the weights on this rank")


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "is_logged"), [("--gradient-accumulation-fusion", True), ("", False)])
def test_run_logs_fused_gradient_share_in_first_logged_step(tmp_path: Path, extra: str, is_logged: bool) -> None:
    def patch_rank(rank: int) -> None:
        original_fusion_text = console.start_table.fusion_text

        def recording_fusion_text(*args: Any) -> str:
            text = original_fusion_text(*args)
            with (tmp_path / "said").open("a") as file:
                file.write(text + "\n")
            return text

        console.start_table.fusion_text = recording_fusion_text  # type: ignore[assignment]

    run_args = f"--train-iters 4 --log-interval 2 --eval-iters 0 --gas 2 {extra}"
    codes, _ = train_ranks(1, make_flags(write_corpus(tmp_path), tmp_path / "run", run_args), patch_rank)
    assert codes == [0]
    logged_texts = (tmp_path / "said").read_text().splitlines() if (tmp_path / "said").exists() else []
    assert len(logged_texts) == is_logged
    if is_logged:
        assert "products accumulate the gradients of 9" in logged_texts[0] and "position" in logged_texts[0], (
            logged_texts
        )

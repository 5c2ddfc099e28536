"""A run repeated from the config.json of its folder takes the same steps."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import make_flags, train_ranks, write_corpus


def read_losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "train"]


def test_run_repeated_from_config_json_has_equal_losses(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    deepspeed_config = tmp_path / "ds.json"
    deepspeed_config.write_text(json.dumps({"optimizer": {"params": {"weight_decay": 0.3}}, "gradient_clipping": 0.2}))
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    run_flags = f"--train-iters 4 --eval-iters 0 --seed 77 --adam-beta2 0.9 --deepspeed_config {deepspeed_config}"
    assert train_ranks(1, make_flags(corpus, first, run_flags))[0] == [0]
    deepspeed_config.unlink()
    config_path = first / "config.json"
    assert train_ranks(1, ["--config", str(config_path), "--save", str(second)])[0] == [0]
    assert len(read_losses(first)) == 4 and read_losses(second) == read_losses(first)
    override_argv = ["--config", str(second / "config.json"), "--save", str(third), "--seed", "78"]
    assert train_ranks(1, override_argv)[0] == [0]
    assert read_losses(third) != read_losses(first), "the command line wins"

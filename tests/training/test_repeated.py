"""A run repeated from the config.json of its folder takes the same steps."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import flags, train_ranks, write_corpus


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]


def test_a_run_repeated_from_its_config_json_has_the_same_losses(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    ds = tmp_path / "ds.json"
    ds.write_text(json.dumps({"optimizer": {"params": {"weight_decay": 0.3}}, "gradient_clipping": 0.2}))
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    said = f"--train-iters 4 --eval-iters 0 --seed 77 --adam-beta2 0.9 --deepspeed_config {ds}"
    assert train_ranks(1, flags(corpus, first, said))[0] == [0]
    ds.unlink()
    file = first / "config.json"
    assert train_ranks(1, ["--config", str(file), "--save", str(second)])[0] == [0]
    assert len(losses(first)) == 4 and losses(second) == losses(first)
    once_more = ["--config", str(second / "config.json"), "--save", str(third), "--seed", "78"]
    assert train_ranks(1, once_more)[0] == [0]
    assert losses(third) != losses(first), "the command line wins"

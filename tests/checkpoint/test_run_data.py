"""Data settings that the user does not give come from the run that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse
from megatron.checkpoint import checkpoint_args
from megatron.checkpoint.run_data import bring_data, has_own_data
from megatron.config import Config
from tests.helpers.huggingface_models import config_of, save_model

RECIPE = "--seq-length 128 --data-path {sample}/gpt2_text_document --split 900,50,50 --packing best-fit"
MINE = {
    "data_path": "data/mine", "tokenizer_path": "data/mine.json", "split": "8,1,1", "seq_length": 32, "seed": 7,
    "eod_mask_loss": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the files that the tests name."""
    monkeypatch.chdir(tmp_path)
    for name in ("data/mine", "data/other", "data/sample/gpt2_text_document"):
        for suffix in (".bin", ".idx"):
            path = tmp_path / f"{name}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    for name in ("mine", "other", "sample/tokenizer"):
        (tmp_path / "data" / f"{name}.json").touch()
    return tmp_path


def run_of(folder: Path, family: str = "gpt2", **fields: Any) -> Path:
    positions = 0 if family == "t5" else 512
    save_model(folder / "run", config_of(family, max_position_embeddings=positions, **fields))
    return folder / "run"


def read(line: str, family: str = "gpt2", recipe: str = RECIPE) -> Config:
    def bring(found: Any, defaults: Any) -> dict[str, Any]:
        sizes = checkpoint_args.bring(found, defaults, "x")
        return {**sizes, **bring_data(found, defaults, "x")}

    recipe = recipe.format(sample=Path.cwd() / "data" / "sample")
    env = {"MEGATRON_DEFAULTS": recipe}
    return parse([*line.split(), "--dry-run"], world_size=1, env=env, family=family, checkpoint_args=bring)


def test_a_resumed_run_has_the_data_of_the_run_and_not_of_the_recipe(folder: Path) -> None:
    run_of(folder, **MINE, num_workers=3)
    for line in ("--load run", "--resume --save run", "--load run --eval-only"):
        config = read(line)
        data = config.data
        assert (data.data_path, data.tokenizer_path, data.split) == ("data/mine", "data/mine.json", "8,1,1")
        assert (data.packing, data.eod_mask_loss) == ("concat", True)
        assert (config.batch.seq_length, config.run.seed) == (32, 7)
        assert data.num_workers == 0, "a matter of this host"
        assert "data_path" not in config.given
        (note,) = [note for note in config.notes if note.startswith("data settings of ")]
        assert "--data-path data/mine" in note and "--split 8,1,1" in note and "--num-workers" not in note


def test_what_the_user_gives_wins_and_the_rest_comes_from_the_run(folder: Path) -> None:
    run_of(folder, **MINE)
    data = read("--load run --data-path data/other --split 1,1,1").data
    assert (data.data_path, data.tokenizer_path, data.split) == ("data/other", "data/mine.json", "1,1,1")
    data = read("--load run --tokenizer-path data/other.json").data
    assert (data.data_path, data.tokenizer_path, data.split) == ("data/mine", "data/other.json", "8,1,1")


def test_of_corpora_for_each_split_and_files_of_a_vocabulary_all_or_none_come_from_the_run(folder: Path) -> None:
    run_of(folder, **MINE)
    data = read("--load run --train-data-path data/other --eval-iters 0").data
    assert (data.data_path, data.train_data_path) == (None, "data/other")
    data = read("--load run --vocab-file data/other.json --merge-file data/other.json").data
    assert (data.tokenizer_path, data.vocab_file) == (None, "data/other.json")


def test_a_run_with_a_corpus_for_each_split_is_resumed_with_them(folder: Path) -> None:
    run_of(folder, train_data_path="data/mine", valid_data_path="data/other", tokenizer_path="data/mine.json")
    data = read("--load run --eval-interval 1").data
    assert (data.data_path, data.train_data_path, data.valid_data_path) == (None, "data/mine", "data/other")


def test_a_fine_tuning_and_a_start_from_scratch_have_the_data_of_the_recipe(folder: Path) -> None:
    run_of(folder, **MINE)
    for line in ("--load run --finetune", "--resume --save none --load-if-exists", ""):
        data = read(f"{line} --seq-length 16" if line else line).data
        assert (data.split, Path(data.data_path or "").parts[-2:]) == ("900,50,50", ("sample", "gpt2_text_document"))


def test_sample_data_of_a_checkout_that_has_moved_are_those_of_this_one(folder: Path) -> None:
    gone = folder / "gone" / "data" / "sample"
    fields = {"data_path": f"{gone}/gpt2_text_document", "tokenizer_path": f"{gone}/tokenizer.json"}
    run_of(folder, **fields, split="900,50,50", packing="best-fit", seq_length=128)
    here = folder / "data" / "sample"
    config = read("--load run", recipe=f"{RECIPE} --tokenizer-path {{sample}}/tokenizer.json")
    assert (config.data.data_path, config.data.tokenizer_path) == (
        str(here / "gpt2_text_document"),
        str(here / "tokenizer.json"),
    )
    assert not [note for note in config.notes if note.startswith("data settings of ")]


def test_lengths_and_spans_of_t5_come_together(folder: Path) -> None:
    fields = {"enc_seq_length": 48, "dec_seq_length": 40, "noise_density": 0.3, "vocab_extra_ids": 100}
    run_of(folder, "t5", data_path="data/mine", tokenizer_path="data/mine.json", **fields)
    own = read("--load run", "t5", "--enc-seq-length 96").own
    assert (own.enc_seq_length, own.dec_seq_length, own.noise_density) == (48, 40, 0.3)
    own = read("--load run --enc-seq-length 96", "t5", "").own
    assert (own.enc_seq_length, own.noise_density) == (96, 0.15)


@pytest.mark.parametrize(
    ("line", "is_own"),
    [
        ("--load run", True), ("--load=run", True), ("--load run --finetune", False), ("--load none", False),
        ("--resume --save run", True), ("--load run --no-such-flag", True), ("--lr 1", False),
    ],
)  # fmt: skip
def test_the_run_scripts_are_told_whether_a_run_has_data_of_its_own(line: str, is_own: bool, folder: Path) -> None:
    run_of(folder, **MINE)
    assert has_own_data("gpt2", line.split(), {}) is is_own
    assert has_own_data("gpt2", [], {"MEGATRON_DEFAULTS": line}) is is_own
    assert not has_own_data("gpt2", line.replace("run", "other").split(), {})
    save_model(folder / "other", config_of("gpt2", data_path="/x/data/sample/gpt2_text_document"))
    assert not has_own_data("gpt2", line.replace("run", "other").split(), {})

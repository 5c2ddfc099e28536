"""Data settings that the user does not give come from the run that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse
from megatron.checkpoint import checkpoint_args
from megatron.checkpoint.run_data import load_data_args, uses_custom_data
from megatron.config import Config
from tests.helpers.huggingface_models import make_family_config, save_model

RECIPE = "--seq-length 128 --data-path {sample}/gpt2_text_document --split 900,50,50 --packing best-fit"
RUN_DATA = {
    "data_path": "data/mine", "tokenizer_path": "data/mine.json", "split": "8,1,1", "seq_length": 32, "seed": 7,
    "eod_mask_loss": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def save_run(work_dir: Path, family: str = "gpt2", **fields: Any) -> Path:
    positions = 0 if family == "t5" else 512
    save_model(work_dir / "run", make_family_config(family, max_position_embeddings=positions, **fields))
    return work_dir / "run"


def parse_line(line: str, family: str = "gpt2", recipe: str = RECIPE) -> Config:
    def load_args(given_flags: Any, defaults: Any) -> dict[str, Any]:
        model_settings = checkpoint_args.load_checkpoint_args(given_flags, defaults, "x")
        return {**model_settings, **load_data_args(given_flags, defaults, "x")}

    recipe = recipe.format(sample=Path.cwd() / "data" / "sample")
    env = {"MEGATRON_DEFAULTS": recipe}
    return parse([*line.split(), "--dry-run"], world_size=1, env=env, family=family, checkpoint_args=load_args)


def test_resumed_run_uses_its_data_instead_of_recipe(work_dir: Path) -> None:
    save_run(work_dir, **RUN_DATA, num_workers=3)
    for line in ("--load run", "--resume --save run", "--load run --eval-only"):
        config = parse_line(line)
        data = config.data
        assert (data.data_path, data.tokenizer_path, data.split) == ("data/mine", "data/mine.json", "8,1,1")
        assert (data.packing, data.eod_mask_loss) == ("concat", True)
        assert (config.batch.seq_length, config.run.seed) == (32, 7)
        assert data.num_workers == 0, "a matter of this host"
        assert "data_path" not in config.explicit_fields
        (note,) = [note for note in config.notes if note.startswith("data settings of ")]
        assert "--data-path data/mine" in note and "--split 8,1,1" in note and "--num-workers" not in note


def test_given_data_flags_override_run_data(work_dir: Path) -> None:
    save_run(work_dir, **RUN_DATA)
    data = parse_line("--load run --data-path data/other --split 1,1,1").data
    assert (data.data_path, data.tokenizer_path, data.split) == ("data/other", "data/mine.json", "1,1,1")
    data = parse_line("--load run --tokenizer-path data/other.json").data
    assert (data.data_path, data.tokenizer_path, data.split) == ("data/mine", "data/other.json", "8,1,1")


def test_split_corpora_and_vocab_files_come_all_or_none_from_run(work_dir: Path) -> None:
    save_run(work_dir, **RUN_DATA)
    data = parse_line("--load run --train-data-path data/other --eval-iters 0").data
    assert (data.data_path, data.train_data_path) == (None, "data/other")
    data = parse_line("--load run --vocab-file data/other.json --merge-file data/other.json").data
    assert (data.tokenizer_path, data.vocab_file) == (None, "data/other.json")


def test_run_with_split_corpora_resumes_with_them(work_dir: Path) -> None:
    save_run(work_dir, train_data_path="data/mine", valid_data_path="data/other", tokenizer_path="data/mine.json")
    data = parse_line("--load run --eval-interval 1").data
    assert (data.data_path, data.train_data_path, data.valid_data_path) == (None, "data/mine", "data/other")


def test_finetuning_and_fresh_start_use_recipe_data(work_dir: Path) -> None:
    save_run(work_dir, **RUN_DATA)
    for line in ("--load run --finetune", "--resume --save none --load-if-exists", ""):
        data = parse_line(f"{line} --seq-length 16" if line else line).data
        assert (data.split, Path(data.data_path or "").parts[-2:]) == ("900,50,50", ("sample", "gpt2_text_document"))


def test_moved_sample_data_resolves_to_current_checkout(work_dir: Path) -> None:
    old_dir = work_dir / "gone" / "data" / "sample"
    fields = {"data_path": f"{old_dir}/gpt2_text_document", "tokenizer_path": f"{old_dir}/tokenizer.json"}
    save_run(work_dir, **fields, split="900,50,50", packing="best-fit", seq_length=128)
    sample_dir = work_dir / "data" / "sample"
    config = parse_line("--load run", recipe=f"{RECIPE} --tokenizer-path {{sample}}/tokenizer.json")
    assert (config.data.data_path, config.data.tokenizer_path) == (
        str(sample_dir / "gpt2_text_document"),
        str(sample_dir / "tokenizer.json"),
    )
    assert not [note for note in config.notes if note.startswith("data settings of ")]


def test_t5_lengths_and_spans_are_taken_together(work_dir: Path) -> None:
    fields = {"enc_seq_length": 48, "dec_seq_length": 40, "noise_density": 0.3, "vocab_extra_ids": 100}
    save_run(work_dir, "t5", data_path="data/mine", tokenizer_path="data/mine.json", **fields)
    family_config = parse_line("--load run", "t5", "--enc-seq-length 96").family_config
    assert (family_config.enc_seq_length, family_config.dec_seq_length, family_config.noise_density) == (48, 40, 0.3)
    family_config = parse_line("--load run --enc-seq-length 96", "t5", "").family_config
    assert (family_config.enc_seq_length, family_config.noise_density) == (96, 0.15)


@pytest.mark.parametrize(
    ("line", "is_custom"),
    [
        ("--load run", True), ("--load=run", True), ("--load run --finetune", False), ("--load none", False),
        ("--resume --save run", True), ("--load run --no-such-flag", True), ("--lr 1", False),
    ],
)  # fmt: skip
def test_run_scripts_detect_custom_data(line: str, is_custom: bool, work_dir: Path) -> None:
    save_run(work_dir, **RUN_DATA)
    assert uses_custom_data("gpt2", line.split(), {}) is is_custom
    assert uses_custom_data("gpt2", [], {"MEGATRON_DEFAULTS": line}) is is_custom
    assert not uses_custom_data("gpt2", line.replace("run", "other").split(), {})
    save_model(work_dir / "other", make_family_config("gpt2", data_path="/x/data/sample/gpt2_text_document"))
    assert not uses_custom_data("gpt2", line.replace("run", "other").split(), {})

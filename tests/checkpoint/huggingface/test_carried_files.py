"""The small files of an imported folder reach an export through an object store and DeepSpeed's format."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.utils.tensorboard  # noqa: F401 - imported once, not by every fork

from megatron.checkpoint.huggingface.convert import export
from megatron.checkpoint.one_process import open_folder
from megatron.errors import CheckpointError
from tests.helpers.instruct_folders import read_files, write_instruct_folder
from tests.helpers.runs import launch_script

RUN_FLAGS = (
    "--data-path mock --seq-length 16 --batch-size 1 --gas 1 --lr 1e-3 --eval-iters 0 --device cpu --progress plain "
    "--attention-dropout 0 --hidden-dropout 0"
)


def test_carried_files_survive_object_store_and_format_change(tmp_path: Path) -> None:
    source, store = write_instruct_folder(tmp_path / "source"), f"file://{tmp_path}/bucket/run"

    def train(name: str, extra_flags: str) -> Path:
        run_dir, log = tmp_path / name, tmp_path / "log"
        argv = (
            f"{RUN_FLAGS} --tokenizer-path {source} --data-cache-path {tmp_path}/cache --save {run_dir} {extra_flags}"
        )
        assert launch_script(1, argv.split(), log) == [0], log.read_text()
        return run_dir

    shutil.rmtree(train("first", f"--load {source} --finetune --train-iters 1 --save-remote {store}"))
    train("second", f"--load {store} --train-iters 2 --save-remote {store} --export-hf-interval 1")
    assert read_files(tmp_path / "bucket" / "run" / "hf" / "step-00000002") == read_files(source)
    deepspeed_run = train("third", f"--load {tmp_path / 'second'} --train-iters 3 --checkpoint-format deepspeed")
    for path in (deepspeed_run, deepspeed_run / "global_step3"):
        with pytest.raises(CheckpointError) as caught:
            open_folder(path)
        assert "global_step3 is in DeepSpeed's format" in str(caught.value)
        assert "--checkpoint-format native --save NEW_FOLDER" in str(caught.value)
    native_run = train("fourth", f"--load {deepspeed_run} --train-iters 3 --checkpoint-format native")
    assert open_folder(native_run).step == 3, "no further step is needed"
    export(open_folder(native_run), tmp_path / "exported")
    assert read_files(tmp_path / "exported") == read_files(source)

"""The small files of an imported folder reach an export through an object store and DeepSpeed's format."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.utils.tensorboard  # noqa: F401 - imported once, not by every fork

from megatron.checkpoint.huggingface.convert import export
from megatron.checkpoint.one_process import open_folder
from megatron.errors import CheckpointError
from tests.helpers.instruct_folders import files_in, write_folder
from tests.helpers.runs import start_script

RUN = (
    "--data-path mock --seq-length 16 --batch-size 1 --gas 1 --lr 1e-3 --eval-iters 0 --device cpu --progress plain "
    "--attention-dropout 0 --hidden-dropout 0"
)


def test_carried_files_survive_an_object_store_and_a_change_of_format(tmp_path: Path) -> None:
    source, store = write_folder(tmp_path / "source"), f"file://{tmp_path}/bucket/run"

    def train(name: str, more: str) -> Path:
        run, log = tmp_path / name, tmp_path / "log"
        words = f"{RUN} --tokenizer-path {source} --data-cache-path {tmp_path}/cache --save {run} {more}"
        assert start_script(1, words.split(), log) == [0], log.read_text()
        return run

    shutil.rmtree(train("first", f"--load {source} --finetune --train-iters 1 --save-remote {store}"))
    train("second", f"--load {store} --train-iters 2 --save-remote {store} --export-hf-interval 1")
    assert files_in(tmp_path / "bucket" / "run" / "hf" / "step-00000002") == files_in(source)
    in_deepspeed = train("third", f"--load {tmp_path / 'second'} --train-iters 3 --checkpoint-format deepspeed")
    for path in (in_deepspeed, in_deepspeed / "global_step3"):
        with pytest.raises(CheckpointError) as caught:
            open_folder(path)
        assert "global_step3 is in DeepSpeed's format" in str(caught.value)
        assert "--checkpoint-format native --save NEW_FOLDER" in str(caught.value)
    native = train("fourth", f"--load {in_deepspeed} --train-iters 3 --checkpoint-format native")
    assert open_folder(native).step == 3, "no further step is needed"
    export(open_folder(native), tmp_path / "exported")
    assert files_in(tmp_path / "exported") == files_in(source)

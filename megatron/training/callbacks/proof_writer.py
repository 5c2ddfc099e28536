"""ProofWriter: writes proof.json to the run folder at the end of the run."""

from __future__ import annotations

import json

from megatron import files
from megatron.training import global_vars
from megatron.training.callbacks.layout_check import LayoutCheck
from megatron.training.proof.check_result import NOT_CHECKED, CheckResult
from megatron.training.proof.record import FILE_NAME, make_proof, script_name
from megatron.training.run_record import VERSIONS
from megatron.training.trainer import Callback


class ProofWriter(Callback):
    """Writes proof.json after the last step, or when the run is stopped; ``proof.record`` has its content."""

    on_all_ranks = False

    def on_train_end(self) -> None:
        trainer = self.trainer
        if not trainer.steps_taken:
            return  # keep the proof of the start that took the last step
        check = trainer.find(LayoutCheck)
        result = None if check is None else check.result
        run = {
            "family": trainer.config.family,
            "script": script_name(),
            "ranks": trainer.world.grid.topology.world_size,
            "step": trainer.progress.step,
            "samples": trainer.progress.samples_consumed,
        }
        proof = make_proof(
            result or CheckResult(NOT_CHECKED, "the run was started without pretrain()"),
            trainer.data.datasets.get("train"),
            global_vars.current_tokenizer(),
            json.loads((trainer.folder / VERSIONS).read_text(encoding="utf-8")),
            run,
        )
        text = json.dumps(proof, indent=2, ensure_ascii=False)
        files.replace_bytes(trainer.folder / FILE_NAME, text.encode() + b"\n")

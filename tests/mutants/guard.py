"""Mistakes in what a run does about bad steps, in the comparison of copies, and in naming a straggler."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GUARD = "tests/training/test_guard.py"
DRIFT = "tests/training/test_drift.py"
BACK = f"{GUARD}::test_bad_steps_lead_back_to_a_good_checkpoint_and_behind_their_data[pipe]"
STOPPED = f"{GUARD}::test_a_stopped_run_goes_back_where_an_undisturbed_one_does[in between]"
FLIPPED = f"{DRIFT}::test_one_flipped_bit_ends_the_run_with_parameter_and_ranks"

GUARDED = (
    Mutant(
        "each rank judges a step by its own loss",
        "megatron/training/callbacks/stability_guard.py",
        "return all_reduce(values, group, dist.ReduceOp.MAX).item()",
        "return values.item()",
        (f"{GUARD}::test_what_one_rank_finds_bad_is_bad_for_all",),
    ),
    Mutant(
        "each rank forgets gradients for its own loss",
        "megatron/training/callbacks/stability_guard.py",
        "        if not math.isfinite(self._loss):",
        "        if not math.isfinite(loss):",
        (f"{GUARD}::test_a_loss_that_is_no_number_on_one_tensor_rank_is_left_out_on_all",),
        refuses=True,  # the ranks wait in different sums
    ),
    Mutant(
        "a bad step counts among those that the next is judged by",
        "megatron/training/callbacks/stability_guard.py",
        "            result.loss, result.grad_norm = loss, norm\n        else:\n            self.losses.add(loss)\n",
        "            result.loss, result.grad_norm = loss, norm\n        if True:\n            self.losses.add(loss)\n",
        (f"{GUARD}::test_too_many_bad_steps_in_a_row_end_the_run_with_advice",),
    ),
    Mutant(
        "samples of a bad step come again",
        "megatron/training/trainer.py",
        "        progress.samples_consumed += count\n",
        "        progress.samples_consumed += 0 if result.is_refused else count\n",
        (f"{GUARD}::test_a_bad_step_is_left_out_on_all_ranks[replicas no number]",),
    ),
    Mutant(
        "a refused step is told by the loss of one rank, which may be sound",
        "megatron/training/callbacks/stability_guard.py",
        "            result.loss, result.grad_norm = loss, norm\n",
        "",
        (f"{GUARD}::test_a_bad_step_is_left_out_on_all_ranks[grid no number]",),
    ),
    Mutant(
        "a good step does not end a row of bad ones",
        "megatron/training/callbacks/stability_guard.py",
        "            self.history.streak, self.history.good_step = 0, self.trainer.samples.step\n",
        "            self.history.good_step = self.trainer.samples.step\n",
        (f"{GUARD}::test_too_many_bad_steps_in_a_row_end_the_run_with_advice",),
    ),
    Mutant(
        "gradients of a loss that is no number count as an overflow",
        "megatron/training/callbacks/stability_guard.py",
        "            self.trainer.engine.optimizer.zero_grad()\n",
        "            pass\n",
        (f"{GUARD}::test_a_bad_loss_is_no_overflow_and_leaves_the_loss_scale_alone",),
    ),
    Mutant(
        "the count of bad steps starts anew with a resume",
        "megatron/training/callbacks/stability_guard.py",
        "        self.history = History(**kept)\n",
        "        self.history = History()\n",
        (STOPPED,),
    ),
    Mutant(
        "the data go on where the checkpoint was",
        "megatron/training/callbacks/stability_guard.py",
        "        trainer.progress.samples_consumed = samples.last + 1\n",
        "",
        (BACK,),
    ),
    Mutant(
        "a run goes back for ever",
        "megatron/training/callbacks/stability_guard.py",
        "        now.returns = before.returns + 1 if before.returned_to == step else 1\n",
        "        now.returns = 1\n",
        (f"{GUARD}::test_a_way_back_that_does_not_help_ends",),
    ),
    Mutant(
        "a way back leads to a checkpoint among the bad steps",
        "megatron/training/callbacks/stability_guard.py",
        "up_to_step=before.good_step)",
        "up_to_step=samples.step)",
        (STOPPED,),
    ),
    Mutant(
        "records of the journal come twice after a resume",
        "megatron/training/callbacks/stability_guard.py",
        'if record["number"] <= known]',
        "]",
        (f"{GUARD}::test_the_journal_keeps_what_belongs_to_a_checkpoint",),
    ),
    Mutant(
        "samples are named as if replicas took turns",
        "megatron/training/train_step.py",
        "(self.share(replica).first + micro_batch)",
        "(micro_batch * self.replicas + replica)",
        (f"{GUARD}::test_samples_are_named_as_replicas_read_them",),
    ),
    Mutant(
        "the checksum sees half of each weight",
        "megatron/training/callbacks/replica_check.py",
        "data[: data.numel() // WORD * WORD].view(torch.int64)",
        "data[: data.numel() // WORD // 2 * WORD].view(torch.int64)",
        (f"{DRIFT}::test_every_flipped_bit_changes_the_checksum",),
    ),
    Mutant(
        "tied copies are not compared",
        "megatron/training/callbacks/replica_check.py",
        "    return [*found, *_tied(module, named)]\n",
        "    return found\n",
        (f"{FLIPPED}[tied]",),
    ),
    Mutant(
        "replicas are not compared",
        "megatron/training/callbacks/replica_check.py",
        "        if group.size > 1 and whole:",
        "        if group.size > 2 and whole:",
        (f"{FLIPPED}[replicas]",),
    ),
    Mutant(
        "weights that differ are saved",
        "megatron/training/callbacks/replica_check.py",
        "        if differ:\n",
        '        if differ:\n            self.trainer.call("on_save")\n',
        (f"{FLIPPED}[replicas]",),
    ),
    Mutant(
        "the wish of one rank to save is its own",
        "megatron/training/trainer.py",
        "        self._save_is_wanted = False\n        if not stops:\n",
        "        saves, self._save_is_wanted = self._save_is_wanted, False\n        if not stops:\n",
        ("tests/training/test_loop.py::test_all_ranks_stop_together_or_none",),
    ),
    Mutant(
        "every rank is its own peer",
        "megatron/training/callbacks/straggler.py",
        "place.pipe == own.pipe and _replica(place) != _replica(own)",
        "place.pipe == own.pipe",
        (f"{DRIFT}::test_the_slowest_is_named_where_it_is_clearly_slower",),
    ),
)

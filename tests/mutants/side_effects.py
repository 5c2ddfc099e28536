"""Mistakes in what goes on beside a run's steps: evaluations, saves, dumps and profiles that move its state."""

from __future__ import annotations

from tests.mutants.mutant import LOOP, Mutant

BESIDE = "tests/training/test_side_effects.py::test_what_goes_on_beside_the_steps_changes_nothing_in_them"
ONE, STAGES = f"{BESIDE}[one rank]", f"{BESIDE}[two stages]"
EACH = "tests/training/test_side_effects.py::test_all_that_can_go_on_beside_the_steps_changes_nothing_in_them[one rank]"
DRAWS = "tests/tds/engine/test_evaluation.py::test_evaluation_with_a_layer_and_data_that_draw_leaves_the_generator_as_it_was"  # noqa: E501
READS_TRAINING = (
    "megatron/training/callbacks/evaluator.py",
    "        batches = trainer.data.batches(",
    "        batches = trainer.batches or trainer.data.batches(",
)

SIDE_EFFECTS = (
    Mutant("an evaluation reads the stream of the training", *READS_TRAINING, (ONE,)),
    Mutant("an evaluation reads the stream of the training in a pipeline, too", *READS_TRAINING, (STAGES,)),
    Mutant(
        "the loop's evaluation opens no stream of its own",
        *READS_TRAINING,
        (f"{LOOP}::test_report_then_evaluate_then_save_then_stop",),
    ),
    Mutant(
        "an evaluation without a pipeline moves the generator",
        "megatron/training/train_step.py",
        "        with random_numbers_kept(self.device):  # a user's layers and samples may draw some\n",
        "        if self.device is not None:\n",
        (ONE,),
    ),
    Mutant(
        "an evaluation of a pipeline moves the generator",
        "tds/engine/evaluate.py",
        "        with random_numbers_kept(device), forwards_uncounted(module):\n",
        "        with forwards_uncounted(module):\n",
        (DRAWS,),
    ),
    Mutant(
        "an evaluation counts as samples of the training",
        "megatron/training/callbacks/evaluator.py",
        "            loss += trainer.engine.evaluate_batch(batches) / iterations\n",
        "            trainer.progress.samples_consumed += 1\n"
        "            loss += trainer.engine.evaluate_batch(batches) / iterations\n",
        (ONE, STAGES),
    ),
    Mutant(
        "norms of layers are taken of gradients that they scale",
        "megatron/training/callbacks/layer_norms.py",
        "square_of_norm(gradient).to(device)",
        "square_of_norm(gradient.mul_(2.0)).to(device)",
        (ONE,),
    ),
    Mutant(
        "a dump leaves its hooks in the model",
        "megatron/training/callbacks/debugger.py",
        "        self._watch.stop()\n",
        "        pass\n",
        (ONE,),
    ),
    Mutant(
        "a dump scales the gradients that it writes",
        "megatron/training/callbacks/debugger.py",
        "            if gradient is not None:\n                cut, chunk",
        "            if gradient is not None:\n                gradient.mul_(0.5)\n                cut, chunk",
        (ONE,),
    ),
    Mutant(
        "a profile seeds the generator, so that it can be repeated",
        "megatron/training/callbacks/profiler.py",
        "        made.start()\n",
        "        made.start()\n        torch.manual_seed(0)\n",
        (EACH,),
    ),
    Mutant(
        "a checkpoint in mid-run sets the generators back to the seed",
        "megatron/training/callbacks/checkpointer.py",
        "        is_due = bool(flags.save_interval) and self.trainer.progress.step % flags.save_interval == 0\n",
        "        is_due = bool(flags.save_interval) and self.trainer.progress.step % flags.save_interval == 0\n"
        "        if is_due:\n            __import__('torch').manual_seed(self.trainer.config.run.seed)\n",
        (ONE,),
    ),
    Mutant(
        "the search for drift draws its weights",
        "megatron/training/callbacks/replica_check.py",
        "    return (parts * (2 * torch.arange(parts.numel(), device=parts.device) + 1)).sum()\n",
        "    torch.rand(1)\n    return (parts * (2 * torch.arange(parts.numel(), device=parts.device) + 1)).sum()\n",
        (STAGES,),
    ),
)

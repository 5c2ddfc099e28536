"""Mistakes in the order of a run's samples, in the growing batch, in what reads ahead, and in the flags of these."""

from __future__ import annotations

from tests.mutants.mutant import LOOP, Mutant

BATCHES = "tests/data/test_batches.py"
FLAGS = "tests/config/test_data.py"
MIXED = "tests/training/test_mixed_runs.py::test_a_run_on_a_mixture_tells_of_each_corpus_and_goes_on_with_other_weights"
ORDER = "tests/training/test_data_order.py"
RAMP = "tests/parity/test_rampup.py"
GROWS = f"{BATCHES}::test_the_batch_grows_with_the_samples_in_every_layout_and_from_any_step"

TRAIN = (
    Mutant(
        "a step of a ramp skips to the end of a whole batch",
        "megatron/data/data_loader.py",
        "            start += self.sizes.at(start)\n",
        "            start += self.sizes.full\n",
        (GROWS,),
    ),
    Mutant(
        "a replica's part of a step lies where that of a whole batch would",
        "megatron/data/data_loader.py",
        "own = start + share.first * self.micro_batch_size\n",
        "own = start + self.data_rank * (self.sizes.full // self.data_size)\n",
        (GROWS,),
    ),
    Mutant(
        "the batch grows a sample early",
        "megatron/config/batch.py",
        "        return self.start + self.increment * (samples_consumed * self.num_increments // self.samples)\n",
        "        return self.start + self.increment * ((samples_consumed + 1) * self.num_increments // self.samples)\n",
        ("tests/config/test_rampup.py::test_the_batch_grows_by_increments_until_the_samples_are_reached",),
    ),
    Mutant(
        "a pipeline takes as many micro-batches in every step",
        "megatron/training/train_step.py",
        "    if number != now:\n",
        "    if number > now:\n",
        (f"{RAMP}::test_steps_of_growing_size_equal_those_of_one_process[2-1]",),
    ),
    Mutant(
        "the size of a step follows the number of steps",
        "megatron/training/trainer.py",
        "count = self.sizes.at(start)",
        "count = self.sizes.at(progress.step)",
        (f"{LOOP}::test_a_ramp_asks_each_step_for_its_micro_batches_and_counts_its_samples",),
    ),
    Mutant(
        "an evaluation in a ramp reads small steps",
        "megatron/training/data.py",
        " if is_training else BatchSizes(config.batch.global_batch_size(replicas)),",
        ",",
        (f"{ORDER}::test_an_evaluation_reads_whole_batches_whatever_the_ramp",),
    ),
    Mutant(
        "the losses of corpora are all those of the mixture",
        "megatron/training/data.py",
        "dataset if corpus is None or ordered is None else ordered.parts[corpus]",
        "dataset",
        (MIXED,),
    ),
    Mutant(
        "corpora count alike in the loss of an evaluation",
        "megatron/training/callbacks/evaluator.py",
        "sum(weights[name] * value for name, value in values.items() if weights[name]) / sum(weights.values())",
        "sum(value for name, value in values.items() if weights[name]) / sum(map(bool, weights.values()))",
        (f"{LOOP}::test_several_corpora_are_evaluated_one_by_one_and_weighed",),
    ),
    Mutant(
        "the data set goes on in its own order after a resume",
        "megatron/training/data.py",
        "            ordered.use_order(order)\n",
        "            pass\n",
        (f"{ORDER}::test_after_a_change_of_weights_no_corpus_repeats_what_it_gave",),
    ),
    Mutant(
        "a resumed run forgets the cursors of its checkpoint",
        "megatron/training/callbacks/checkpointer.py",
        "            trainer.data.use_order(order)\n",
        "            pass\n",
        (MIXED,),
    ),
    Mutant(
        "a checkpoint holds the cursors of the start",
        "megatron/training/data.py",
        "data.order.state(samples_consumed)",
        "data.order.state(0)",
        (MIXED,),
    ),
    Mutant(
        "other data are taken without a word",
        "megatron/training/data.py",
        "consumed, allow_change=allow_change, ratio=ratio,",
        "consumed, allow_change=True, ratio=ratio,",
        (f"{ORDER}::test_another_corpus_is_an_error_that_says_what_has_changed_unless_it_is_allowed",),
    ),
    Mutant(
        "reading ahead draws from the generator of dropout",
        "megatron/data/data_loader.py",
        "            generator=torch.Generator(),",
        "            generator=None,",
        (
            ""
            "tests/data/test_read_ahead.py::test_readers_heed_no_signal_for_the_job_import_nothing_and_leave_seeds_alone",
        ),
    ),
    Mutant(
        "a wait for data is told again and again",
        "megatron/training/data.py",
        "        waited, self._waited_s = self._waited_s, 0.0\n",
        "        waited = self._waited_s\n",
        ("tests/training/test_timed_batches.py::test_only_the_time_in_next_counts_and_only_once",),
    ),
    Mutant(
        "only the last size of a ramp is checked",
        "megatron/arguments/validate.py",
        "        sizes = config.batch.sizes(replicas).all()\n",
        "        sizes = config.batch.sizes(replicas).all()[-1:]\n",
        (f"{FLAGS}::test_a_ramp_of_the_batch_is_checked_size_by_size",),
    ),
    Mutant(
        "the recipe's data and those of the command line mix",
        "megatron/arguments/flag_values.py",
        '        defaults.pop("split", None)\n',
        "        pass\n",
        (f"{FLAGS}::test_a_path_for_each_split_takes_the_place_of_the_recipes",),
    ),
    Mutant(
        "weights of several corpora are all one",
        "megatron/config/data.py",
        "    return tuple(zip(weights, paths, strict=True))\n",
        "    return tuple((1.0, path) for path in paths)\n",
        ("tests/config/test_mixtures.py::test_one_path_and_several_with_weights",),
    ),
)

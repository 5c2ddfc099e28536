"""Mistakes in a sequence length that grows, and in a position that is kept in tokens."""

from __future__ import annotations

from tests.mutants.mutant import LOOP, Mutant

CUT = "tests/data/test_growing_length.py"
FORMER = "tests/checkpoint/test_former.py::test_a_position_in_samples_is_one_in_tokens_of_the_saved_lengths"
LABELS = f"{CUT}::test_every_token_is_a_label_once_whatever_the_schedule"
LENGTHS = "tests/config/test_seq_length.py"
ORDER = "tests/training/test_data_order.py::test_samples_of_another_length_go_on_behind_as_many_tokens_of_each_corpus"
PARITY = "tests/parity/test_seq_length.py"
RATES = "tests/training/test_plan.py::test_rates_count_pieces_as_samples_of_their_length"
REFUSED = f"{LENGTHS}::test_a_schedule_that_cannot_be_is_told_with_the_way_out"
SHOWN = f"{LOOP}::test_a_length_that_grows_is_told_and_losses_are_evaluated_at_that_of_the_step_to_come"

SEQ_LENGTH = (
    Mutant(
        "pieces do not overlap, so that every label behind a cut is lost",
        "megatron/data/data_loader.py",
        "    return values.unfold(1, length + 1, length).reshape(-1, length + 1)\n",
        "    return values[:, : values.shape[1] // (length + 1) * (length + 1)].reshape(-1, length + 1)\n",
        (f"{CUT}::test_a_cut_is_slices_that_share_one_token", LABELS),
    ),
    Mutant(
        "the pieces of several samples alternate",
        "megatron/data/data_loader.py",
        "    return values.unfold(1, length + 1, length).reshape(-1, length + 1)\n",
        "    return values.unfold(1, length + 1, length).transpose(0, 1).reshape(-1, length + 1)\n",
        (f"{CUT}::test_a_cut_is_slices_that_share_one_token",),
    ),
    Mutant(
        "the documents of packed samples are not cut",
        "megatron/data/data_loader.py",
        "            batch = {key: cut(key, values, length) for key, values in batch.items()}\n",
        '            batch["text"] = cut("text", batch["text"], length)\n',
        (f"{CUT}::test_processes_that_read_ahead_give_the_same_through_every_switch",),
    ),
    Mutant(
        "the length changes a step late",
        "megatron/data/data_loader.py",
        "            length = self.length_at(start)\n",
        "            length = self.length_at(max(start - self.sizes.at(start), 0))\n",
        (LABELS,),
    ),
    Mutant(
        "a step that begins at the tokens of an entry has the length of the one before",
        "megatron/config/seq_length.py",
        "        number = bisect_right(self.steps, tokens, key=lambda step: step[0])\n",
        "        number = bisect_right(self.steps, tokens - 1, key=lambda step: step[0]) or 1\n",
        (f"{LENGTHS}::test_a_step_has_the_length_of_the_last_entry_that_it_begins_at_or_after",),
    ),
    Mutant(
        "the schedule counts samples",
        "megatron/config/seq_length.py",
        "        return self.at(samples_consumed * self.full)\n",
        "        return self.at(samples_consumed)\n",
        (f"{LENGTHS}::test_a_step_has_the_length_of_the_last_entry_that_it_begins_at_or_after", LABELS),
    ),
    Mutant(
        "tokens consumed are counted at the first length",
        "megatron/config/seq_length.py",
        "        return self.at(samples_consumed * self.full)\n",
        "        return self.at(samples_consumed * self.all()[0])\n",
        (LABELS,),
    ),
    Mutant(
        "the trainer takes the length of the step that comes next for that of this one",
        "megatron/training/trainer.py",
        "        self.seq_length = self.lengths.of_step(start)\n",
        "        self.seq_length = self.lengths.of_step(start + count)\n",
        (SHOWN,),
    ),
    Mutant(
        "losses are evaluated on whole samples",
        "megatron/training/callbacks/evaluator.py",
        "        length = trainer.next_seq_length\n",
        "        length = trainer.lengths.full\n",
        (SHOWN,),
    ),
    Mutant(
        "losses are evaluated at the length of the step before",
        "megatron/training/callbacks/evaluator.py",
        "        length = trainer.next_seq_length\n",
        "        length = trainer.seq_length\n",
        (SHOWN,),
    ),
    Mutant(
        "an evaluation follows the schedule from its own first sample on",
        "megatron/training/data.py",
        "            lengths = SeqLengths(lengths.full, ((0, length),))\n",
        "            lengths = config.batch.lengths\n",
        (f"{PARITY}::test_a_length_equals_samples_of_that_length_that_are_the_pieces[4]",
         "tests/training/test_data_order.py::test_an_evaluation_reads_the_length_that_it_is_told"),
    ),
    Mutant(
        "the number of a piece within the global batch is that of its sample",
        "megatron/mpu/random.py",
        "        return (at.first + at.micro_batch) * samples\n",
        "        return (at.first + at.micro_batch) * self.micro_batch_size\n",
        (f"{PARITY}::test_a_run_through_its_switches_equals_one_process[1-1-2-]",
         f"{PARITY}::test_micro_batches_may_be_cut_otherwise"),
    ),
    Mutant(
        "FLOPs are those of whole samples",
        "megatron/training/trainer.py",
        "        self.samples_taken[self.seq_length] += count\n",
        "        self.samples_taken[self.lengths.full] += count\n",
        (SHOWN,),
    ),
    Mutant(
        "FLOPs of a sample are those of one piece",
        "megatron/training/callbacks/speed_monitor.py",
        "            self._by_length[length] = batch.seq_length // length * piece\n",
        "            self._by_length[length] = piece\n",
        (RATES,),
    ),
    Mutant(
        "a checkpoint does not say the tokens consumed",
        "megatron/training/train_state.py",
        '        return {**asdict(self), "tokens_consumed": self.samples_consumed * tokens_per_sample}\n',
        "        return asdict(self)\n",
        ("tests/training/test_seq_length.py::test_a_run_that_stops_in_mid_schedule_goes_on_with_its_bits[1]", ORDER),
        refuses=True,
    ),
    Mutant(
        "samples of another length go on at the same number of samples",
        "megatron/training/train_state.py",
        '            found.samples_consumed = -(-saved["tokens_consumed"] // tokens_per_sample)\n',
        "            pass\n",
        (ORDER, FORMER),
    ),
    Mutant(
        "samples of another length go on within a sample that has been read in part",
        "megatron/training/train_state.py",
        '            found.samples_consumed = -(-saved["tokens_consumed"] // tokens_per_sample)\n',
        '            found.samples_consumed = saved["tokens_consumed"] // tokens_per_sample\n',
        (FORMER,),
    ),
    Mutant(
        "corpora in samples of another length keep their number of samples",
        "megatron/data/blended_dataset.py",
        "        cursors = {name: math.ceil(cursor * ratio) for name, cursor in cursors.items()}\n",
        "",
        (ORDER,),
    ),
    Mutant(
        "corpora in samples of another length begin anew",
        "megatron/data/blended_dataset.py",
        "        matches |= _cut_otherwise(order, saved, matches)\n",
        "",
        (ORDER,),
    ),
    Mutant(
        "the tokens of a former checkpoint are counted by the lengths of now",
        "megatron/checkpoint/former.py",
        '        return int(own["enc_seq_length"]) + int(own["dec_seq_length"])\n',
        '        return int(own["enc_seq_length"])\n',
        (FORMER,),
    ),
    Mutant(
        "lengths that do not divide a sample are taken",
        "megatron/config/seq_length.py",
        "if full % length and length < full):\n",
        "if length > full):\n",
        (REFUSED,),
    ),
    Mutant(
        "lengths of a schedule need not fit the context ranks",
        "megatron/config/seq_length.py",
        "        parts = 2 * c * (t if parallel.sequence_parallel else 1)\n",
        "        parts = 1\n",
        (REFUSED,),
    ),
    Mutant(
        "a layer is compiled for as many lengths as torch allows",
        "megatron/training/compile.py",
        "GRAPHS_OF_A_LENGTH * num_lengths)\n",
        "GRAPHS_OF_A_LENGTH)\n",
        ("tests/training/test_compiled.py::test_each_length_of_a_schedule_has_a_graph_however_many_they_are",),
        refuses=True,
    ),
    Mutant(
        "a dump counts samples where it has pieces",
        "megatron/training/callbacks/debugger.py",
        "        samples = self.config.batch.batch_size * self.trainer.num_pieces\n",
        "        samples = self.config.batch.batch_size\n",
        ("tests/training/test_debugging.py::test_pieces_of_samples_are_dumped_as_samples_in_every_micro_batch_size",),
    ),
)  # fmt: skip

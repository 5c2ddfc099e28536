"""Mistakes in what is dumped of modules, in the search for the first NaN, and in the comparison of two dumps."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ADD_UP = "tests/debug/test_statistics.py::test_parts_in_any_cut_add_up_to_the_whole"
SEEN = "tests/debug/test_statistics.py::test_a_change_that_keeps_norm_mean_and_largest_number_is_seen_at_its_size"
NAMED = "tests/debug/test_finite.py::test_the_module_or_the_way_between_two_is_named"
SENT = "tests/debug/test_finite.py::test_a_gradient_that_a_module_spoils_is_told_from_one_that_others_add"
ARRIVED = "tests/debug/test_finite.py::test_what_has_arrived_is_nobodys_here_and_a_loss_is_named"
ONCE = "tests/debug/test_dumps.py::test_a_dump_changes_no_bit_and_holds_each_tensor_of_a_recomputed_split_backward_once"
OFF = "tests/debug/test_dumps.py::test_a_layer_that_is_off_by_a_thousandth_on_two_tensor_ranks_is_named"
AGAIN = "tests/debug/test_dumps.py::test_a_step_that_comes_again_replaces_the_first_and_a_line_cut_off_is_left_out"
AT_ONCE = "tests/debug/test_dumps.py::test_a_line_is_there_as_soon_as_it_is_written"
CHUNKS = "tests/debug/test_finite.py::test_what_comes_to_a_chunk_is_nobodys_and_the_loss_is_of_the_last_chunk_alone"
OWN = "tests/debug/test_own_models.py"
ORDER = "tests/debug/test_order.py"
SHARES = f"{ORDER}::test_shares_add_up_and_rows_whose_gradient_never_came_are_zeros"
SUMS = "tests/debug/test_statistics.py::test_of_a_sum_mean_and_sketch_are_known_and_tell_a_share_that_is_off"
T5 = "tests/debug/test_dumps.py::test_parts_of_the_sequence_of_other_families_agree"
OPENING = "tests/debug/test_opening.py"
RUNS = "tests/training/test_debugging.py::test_the_rank_that_holds_the_module_names_it_and_all_end_ahead_of_the_update"
FAMILIES = "tests/debug/test_dumps.py::test_other_families_agree_in_slices_and_stages"
LLAMA, BERT = (f"{FAMILIES}[examples.{name}.pretrain_{name}]" for name in ("llama", "bert"))
NOTHING = "tests/training/test_debugging.py::test_without_the_flags_nothing_is_imported_hooked_or_wrapped"

DUMPS = (
    Mutant(
        "a slice's columns have the signs of the first ones",
        "megatron/debug/statistics.py",
        "np.arange(first + 1, first + number + 1,",
        "np.arange(1, number + 1,",
        (ADD_UP,),
    ),
    Mutant(
        "norms of parts are added up",
        "megatron/debug/statistics.py",
        "math.hypot(*(part.norm for part in parts))",
        "math.fsum(part.norm for part in parts)",
        (ADD_UP,),
    ),
    Mutant(
        "dumps are compared by norms alone",
        "megatron/debug/compare.py",
        "    errors.append(_share(_rms([x - y for x, y in rows]), size))\n",
        "",
        (SEEN,),
    ),
    Mutant(
        "a forward that is run again is shown again",
        "megatron/debug/hooks.py",
        "            if not is_again:\n                self._last",
        "            if True:\n                self._last",
        (ONCE,),
    ),
    Mutant(
        "what others add to a gradient is taken for what the module sends back",
        "megatron/debug/hooks.py",
        "            view = x.view_as(x)\n            cut, share",
        "            view = x\n            cut, share",
        (SENT,),
    ),
    Mutant(
        "hooks stay behind the step",
        "megatron/debug/hooks.py",
        "            handle.remove()\n",
        "            pass\n",
        (NOTHING,),
    ),
    Mutant(
        "evaluations are looked at",
        "megatron/debug/hooks.py",
        "            return\n        micro_batch, is_again",
        "            pass\n        micro_batch, is_again",
        ("tests/debug/test_finite.py::test_infinity_counts_and_an_evaluation_does_not",),
    ),
    Mutant(
        "the last module with NaN is named",
        "megatron/debug/hooks.py",
        ".flatten().tolist():\n",
        ".flatten().tolist()[::-1]:\n",
        (NAMED,),
    ),
    Mutant(
        "what has come from another stage is this one's",
        "megatron/debug/hooks.py",
        "seen.is_boundary and not self._is_of_loss(seen)",
        "False",
        (ARRIVED,),
    ),
    Mutant(
        "only NaN counts",
        "megatron/debug/hooks.py",
        "(~wide.isfinite().all(1))",
        "wide.isnan().any(1)",
        ("tests/debug/test_finite.py::test_infinity_counts_and_an_evaluation_does_not",),
    ),
    Mutant(
        "the rank that found nothing goes on to the update",
        "megatron/training/callbacks/debugger.py",
        "        if all_reduce(number, self.world.grid.world, dist.ReduceOp.MAX).item():\n",
        "        if number.item():\n",
        (RUNS,),
        refuses=True,
    ),
    Mutant(
        "the run ends behind the update",
        "megatron/training/callbacks/debugger.py",
        "        if self._is_looking:\n            self._ahead_of_update()\n",
        "        pass\n",
        (RUNS,),
    ),
    Mutant(
        "slices of a tensor group are taken for copies",
        "megatron/debug/compare.py",
        "        by_place[record.cut].append(record)\n",
        "        by_place[None].append(record)\n",
        (OFF,),
    ),
    Mutant(
        "samples of one micro-batch stand for those of several",
        "megatron/debug/compare.py",
        "        if first <= own.first and own.stop <= stop:\n",
        "        if first == own.first:\n",
        (ONCE,),
    ),
    Mutant(
        "the columns of every tensor rank are the first ones",
        "megatron/debug/statistics.py",
        "    return Cut(output.dim() - 1, shard.start // ways,",
        "    return Cut(output.dim() - 1, 0,",
        (OFF,),
    ),
    Mutant(
        "the second product of a gated half is told as the columns behind those of the first",
        "megatron/debug/statistics.py",
        "shard.start // ways, shard.length // ways,",
        "shard.start, shard.length // ways,",
        (LLAMA,),
    ),
    Mutant(
        "shares of a sum are taken for parts",
        "megatron/debug/compare.py",
        "    if any(record.is_share for record in records):\n",
        "    if False:\n",
        (SHARES,),
    ),
    Mutant(
        "rows whose gradient never came are left out of the count",
        "megatron/debug/compare.py",
        "    return missing * math.prod(",
        "    return 0 * math.prod(",
        (SHARES,),
    ),
    Mutant(
        "fewer positions on a rank are taken for fewer samples",
        "megatron/debug/compare.py",
        "(*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])",
        "shape",
        (SHARES,),
    ),
    Mutant(
        "the sketch of a sum is that of one share",
        "megatron/debug/statistics.py",
        "        inf=max(part.inf for part in parts),\n",
        "        inf=max(part.inf for part in parts),\n        sketch=parts[0].sketch,\n",
        (SUMS,),
    ),
    Mutant(
        "the decoder of T5 tells of its memory's gradient as if it were whole",
        "megatron/models/t5/model.py",
        "self.shares = (1,) if place.sequence_parallel else ()",
        "self.shares = ()",
        (f"{T5}[pretrain_t5-(2, 1, 1)]",),
    ),
    Mutant(
        "of a pipeline and one process only first tensors are compared",
        "megatron/debug/compare.py",
        "(len(have_pipeline) == 1 or is_own(key))",
        "(len(have_pipeline) == 1 or key.index == 0)",
        (LLAMA,),
    ),
    Mutant(
        "a gated half does not call its product up",
        "megatron/models/common/transformer.py",
        "gate, value = self.up(x)",
        "gate, value = self.up.forward(x)",
        ("tests/debug/test_finite.py::test_the_first_product_of_a_gated_feed_forward_half_is_named",),
    ),
    Mutant(
        "a weight that is handed on counts as a tensor of samples",
        "megatron/debug/hooks.py",
        " and not isinstance(value, nn.Parameter)",
        "",
        (BERT,),
    ),
    Mutant(
        "a step that comes again is read twice",
        "megatron/debug/dump_files.py",
        'if each["step"] < line["step"]]',
        'if each["step"] != line["step"] + 9]',
        (AGAIN,),
    ),
    Mutant(
        "lines wait in memory",
        "megatron/debug/dump_files.py",
        "        self._file.flush()\n",
        "",
        (AT_ONCE,),
    ),
    Mutant(
        "a mean of replicas is taken for a sum over tokens",
        "megatron/debug/dump_files.py",
        "    is_weighted = forms.get(record.step, next(iter(forms.values()), True))\n",
        "    is_weighted = True\n",
        (f"{OWN}::test_what_the_last_stage_says_of_the_loss_holds_for_the_gradients_of_all_ranks",),
    ),
    Mutant(
        "all of a tensor group speak of what one has made",
        "megatron/training/callbacks/debugger.py",
        " or own > first.item() else found",
        " else found",
        ("tests/training/test_debugging.py::test_of_a_tensor_group_the_rank_that_made_it_speaks_alone",),
    ),
    Mutant(
        "what comes to any chunk of the last stage is the loss's",
        "megatron/debug/hooks.py",
        " and seen.chunk == self.chunks - 1",
        "",
        (CHUNKS,),
    ),
    Mutant(
        "only the first tensor that comes from another stage has arrived",
        "megatron/debug/hooks.py",
        '        for index, tensor in tensors_in(args):\n            seen = Seen(""',
        '        for index, tensor in list(tensors_in(args))[:1]:\n            seen = Seen(""',
        (CHUNKS,),
    ),
    Mutant(
        "hooks stay on tensors that a module keeps",
        "megatron/debug/hooks.py",
        "                if tensor.is_leaf:",
        "                if tensor is None:",
        ("tests/debug/test_finite.py::test_nothing_stays_on_a_tensor_that_a_module_keeps_and_returns",),
    ),
    Mutant(
        "a backward goes through stages as a forward does",
        "megatron/debug/compare.py",
        "    return -piece if PHASES",
        "    return piece if PHASES",
        (f"{ORDER}::test_stages_and_chunks_tell_the_order_and_clocks_of_hosts_do_not",),
    ),
    Mutant(
        "infinity of either sign is the same",
        "megatron/debug/compare.py",
        "(torch.isnan, torch.isposinf, torch.isneginf)",
        "(torch.isnan, torch.isinf)",
        (f"{ORDER}::test_equal_places_of_nan_leave_the_finite_numbers_to_judge",),
    ),
    Mutant(
        "positions of micro-batches of other sizes are added up",
        "megatron/debug/compare.py",
        "    return sizes[0] == sizes[1] or {",
        "    return bool(sizes) or {",
        (f"{ORDER}::test_what_has_no_samples_is_left_out_where_micro_batches_differ_in_size",),
    ),
    Mutant(
        "a step too few is warned of",
        "megatron/training/callbacks/debugger.py",
        "first >= max(steps.stop",
        "first > max(steps.stop",
        (f"{OPENING}::test_a_run_that_goes_on_behind_the_steps_to_dump_says_so_once",),
    ),
    Mutant(
        "modules must be found on every stage",
        "megatron/training/callbacks/debugger.py",
        "    if not any(world",
        "    if not all(world",
        (f"{OPENING}::test_a_dump_of_no_module_is_refused_and_one_of_another_stage_is_not",),
        refuses=True,
    ),
    Mutant(
        "steps behind the end of the run are taken",
        "megatron/config/run.py",
        "    if first > last:\n",
        "    if first > last + 1:\n",
        ("tests/config/test_debug.py::test_what_cannot_act_is_refused",),
    ),
)

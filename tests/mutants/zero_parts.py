"""Mistakes in ZeRO 2 and 3 and in offload: sums over replicas, weights that come and go, copies on the CPU."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARTS = "tests/optim/zero/test_zero_parts.py"
STEPS = f"{PARTS}::test_steps_of_one_micro_batch_leave_the_bits_of_stage_0_in_every_precision"
MICRO = f"{PARTS}::test_micro_batches_add_up_to_rounding"
HELD = f"{PARTS}::test_gradients_and_weights_are_held_in_parts_and_gathered_by_the_layer"
ALONE = f"{PARTS}::test_what_reads_a_weight_outside_of_any_call_gets_no_number"
LAYERS = "tests/optim/zero/test_zero_layers.py"
HELD_UP = f"{LAYERS}::test_weights_without_gradients_hold_nothing_up_from_the_first_micro_batch_on"
OTHER_WAYS = f"{LAYERS}::test_replicas_that_call_other_layers_are_stopped_on_all_ranks_before_a_weight_is_changed"
PREFETCH = "tests/optim/zero/test_prefetch.py"
ISSUED = f"{PREFETCH}::test_from_the_second_micro_batch_on_gathers_are_issued_one_ahead"
HASHES = f"{PREFETCH}::test_one_hash_for_each_micro_batch_tells_orders_apart"
ONE_LEAVES = f"{PREFETCH}::test_a_replica_that_leaves_the_order_alone_is_named_on_all"
BYTES = "tests/training/test_zero_bytes.py::test_counted_bytes_of_a_rank_are_those_of_the_formulas"

ZERO_PARTS = (
    Mutant(
        "every replica keeps the first one's part of the sums",
        "megatron/optim/zero/stage2.py",
        "part = share.of(self.flat[start : start + number].view(share.parameter.shape), self.group.rank)",
        "part = share.of(self.flat[start : start + number].view(share.parameter.shape), 0)",
        (STEPS,),
        refuses=True,
    ),
    Mutant(
        "a reduce-scatter sends other numbers to other replicas",
        "megatron/optim/zero/stage2.py",
        "            place.copy_(parts)\n",
        "            place.copy_(parts * torch.arange(1, 1 + len(parts)).view(-1, *[1] * (parts.dim() - 1)))\n",
        (f"{PARTS}::test_a_reduce_scatter_leaves_the_parts_of_the_all_reduce",),
    ),
    Mutant(
        "a part keeps the whole sum in memory",
        "megatron/optim/zero/stage2.py",
        "yield share.parameter, part.clone(memory_format=torch.contiguous_format)",
        "yield share.parameter, part.contiguous()",
        (f"{PARTS}::test_a_reduce_scatter_leaves_the_parts_of_the_all_reduce",),
    ),
    Mutant(
        "gradients travel in 16 bits",
        "megatron/optim/zero/stage2.py",
        "            place.view(share.parameter.shape).copy_(share.gradient)\n",
        "            place.view(share.parameter.shape).copy_(share.gradient.bfloat16())\n",
        (STEPS,),
    ),
    Mutant(
        "the last micro-batch alone counts",
        "megatron/optim/zero/stage2.py",
        "                self._parts[parameter].add_(part)\n",
        "                self._parts[parameter].copy_(part)\n",
        (MICRO,),
    ),
    Mutant(
        "sums still on their way are forgotten",
        "megatron/optim/zero/stage2.py",
        "        self._sum(self._order.rest())\n        self._wait()\n",
        "        self._sum(self._order.rest())\n        self._pending = None\n",
        (STEPS,),
    ),
    Mutant(
        "the norm is that of one replica's parts",
        "megatron/optim/optimizer.py",
        "[self.gradient_holders.handle, self.model_group.handle]",
        "[self.model_group.handle]",
        (STEPS,),
        refuses=True,  # ranks that do not agree on an overflow wait for each other in vain
    ),
    Mutant(
        "all replicas count what is not cut",
        "megatron/optim/zero/stage2.py",
        "        return self._masters.is_cut(parameter) or self.holders.rank == 0\n",
        "        return True\n",
        (STEPS,),
    ),
    Mutant(
        "the engine sums once more",
        "megatron/training/train_step.py",
        "        if sums_gradients:\n            self.optimizer.scale_gradients(1.0)\n",
        "        if sums_gradients and self.grid.data.size > 2:\n            self.optimizer.scale_gradients(1.0)\n",
        (
            "tests/parity/test_zero_parts.py::"
            "test_replicas_that_keep_parts_of_all_and_offload_them_train_to_the_bits_of_stage_0",
        ),
        refuses=True,
    ),
    Mutant(
        "weights are gathered from before the update",
        "megatron/optim/main_params.py",
        "                home.copy_(self.of[parameter])\n",
        "                pass\n",
        (STEPS,),
    ),
    Mutant(
        "what is gathered outlives the update",
        "megatron/optim/optimizer.py",
        "            self._units.free()  # what is gathered would be of before\n",
        "            pass\n",
        (ALONE,),
    ),
    Mutant(
        "weights stay gathered",
        "megatron/optim/zero/stage3.py",
        "            whole.untyped_storage().resize_(0)\n",
        "            pass\n",
        (HELD,),
    ),
    Mutant(
        "a layer waits for the end of backward",
        "megatron/optim/zero/stage3.py",
        "        if self._come >= self._due and not self.calls:\n",
        "        if self._come > self._due:\n",
        (BYTES,),
    ),
    Mutant(
        "a weight that two layers share goes with the first",
        "megatron/optim/zero/stage3.py",
        "        if layer is not None and not others:\n",
        "        if layer is not None:\n",
        (f"{PARTS}::test_layers_are_the_elements_of_lists_and_what_they_share_is_the_rest",),
    ),
    Mutant(
        "old values are left where a weight was",
        "megatron/optim/zero/stage3.py",
        "whole.new_full((), torch.nan)",
        "whole.new_full((), 0.0)",
        (ALONE,),
    ),
    Mutant(
        "a forward that fails leaves the watch on",
        "megatron/optim/zero/stage3.py",
        "always_call=True",
        "always_call=False",
        (ALONE,),
    ),
    Mutant(
        "masters stay beside the weights",
        "megatron/optim/main_params.py",
        "        if self.offload.optimizer:\n            part =",
        "        if False:\n            part =",
        (f"{PARTS}::test_what_is_offloaded_has_copies_of_its_own",),
    ),
    Mutant(
        "offload of the weights does nothing",
        "megatron/optim/main_params.py",
        "        return self.offload.copy(part) if self.offload.parameters else",
        "        return part if self.offload.parameters else",
        (BYTES,),
    ),
    Mutant(
        "the plan forgets the gathered layer",
        "megatron/models/common/memory.py",
        "            gathered=gathered * self.width if",
        "            gathered=0 * self.width if",
        (BYTES,),
    ),
    Mutant(
        "ZeRO 3 enters a pipeline",
        "megatron/arguments/validate.py",
        "    if stage > 1 and parallel.has_pipeline:\n",
        "    if stage == 2 and parallel.has_pipeline:\n",
        ("tests/arguments/test_zero.py::test_stages_2_and_3_are_refused_with_the_reason_and_what_to_do",),
    ),
    Mutant(
        "offload to disks is taken for the CPU",
        "megatron/arguments/deepspeed_keys.py",
        'choices=("cpu", "none")',
        'choices=("cpu", "none", "nvme")',
        ("tests/arguments/test_zero.py::test_the_json_offloads_to_the_cpu_and_to_nothing_else",),
    ),
    Mutant(
        "replicas do not look at what others gather",
        "megatron/optim/zero/gather_order.py",
        "        if len(set(words)) > 1:\n",
        "        if False:\n",
        (f"{OTHER_WAYS}[evaluates]",),
        refuses=True,
    ),
    Mutant(
        "the end of a micro-batch is not told",
        "megatron/optim/zero/stage3.py",
        "        self._order.end()\n        self.free()\n",
        "        self.free()\n",
        (f"{OTHER_WAYS}[goes on]",),
        refuses=True,
    ),
    Mutant(
        "a bucket that is not filled holds up those behind it",
        "tds/gradient_reducer.py",
        "        self._arrange(sorted(self._guess, key=lambda bucket: agreed[self._number_of[bucket[0]]]))\n",
        "        pass\n",
        (f"{HELD_UP}[2]",),
    ),
    Mutant(
        "a layer waits for gradients that do not come",
        "megatron/optim/zero/stage3.py",
        "            self._due = sum(map(gradients.will_reach, self._whole))\n",
        "            self._due = len(self._whole)\n",
        (f"{HELD_UP}[3]",),
    ),
    Mutant(
        "an encoder is gathered as one",
        "megatron/optim/zero/stage3.py",
        "LISTS if _is_cut(child) else ()",
        "()",
        (f"{LAYERS}::test_lists_within_layers_are_cut_again_where_most_weights_are_in_them",),
    ),
    Mutant(
        "other hooks run before a layer is gathered",
        "megatron/optim/zero/stage3.py",
        "partial(self._enter, units), prepend=True",
        "partial(self._enter, units), prepend=False",
        (f"{LAYERS}::test_hooks_and_tensors_of_other_kinds_see_the_weights",),
    ),
    Mutant(
        "single numbers are scattered, each sum in an order of its own",
        "megatron/optim/zero/stage2.py",
        "kinds = [([s for s in shares if s.cut is not None], True), ",
        "kinds = [(shares, True)] if shares else [",
        (f"{PARTS}::test_single_numbers_do_not_drift_apart_where_a_reduce_scatter_adds_in_orders_of_its_own",),
    ),
    Mutant(
        "halving makes the hysteresis whole again",
        "megatron/optim/grad_scaler.py",
        "                self.scale = max(self.scale / 2.0, self.floor)\n",
        "                self.scale, self.overflows_left = max(self.scale / 2.0, self.floor), self.hysteresis\n",
        ("tests/optim/test_scaler.py::test_every_overflow_is_answered_as_deepspeed_does",),
    ),
    Mutant(
        "gradients are used on the CPU before they are there",
        "megatron/optim/zero/partition.py",
        "            device.finish_copies(place)\n",
        "            pass\n",
        ("tests/optim/zero/test_host.py::test_copies_are_waited_for_once_behind_the_last",),
    ),
    Mutant(
        "a run of equal parts goes to the first replicas",
        "megatron/optim/zero/partition.py",
        "slots[first : first + number,",
        "slots[:number,",
        (f"{PARTS}::test_a_reduce_scatter_leaves_the_parts_of_the_all_reduce",),
    ),
    Mutant(
        "what came ahead of an update is used after it",
        "megatron/optim/zero/stage3.py",
        "        self._order.drop()\n        for unit in self.units:\n            self._free(unit)\n",
        "        for unit in self.units:\n            self._free(unit)\n",
        (f"{PREFETCH}::test_what_comes_ahead_of_an_update_is_not_used_after_it",),
    ),
    Mutant(
        "nobody waits for what was gathered ahead",
        "megatron/optim/zero/partition.py",
        "        if self.work is not None:\n            self.work.wait()\n",
        "        pass\n",
        ("tests/cuda/test_order.py::test_what_runs_beside_the_computation_is_waited_for[weights a layer ahead]",),
    ),
    Mutant(
        "a layer takes what was gathered ahead for another",
        "megatron/optim/zero/gather_order.py",
        "        elif self._is_other or self._order[len(self._done)] != number:\n",
        "        elif self._is_other:\n",
        (f"{PREFETCH}::test_replicas_that_leave_the_order_together_get_the_right_weights",),
        refuses=True,
    ),
    Mutant(
        "another layer than the next is gathered ahead",
        "megatron/optim/zero/gather_order.py",
        "            following = self._order[len(self._done)]\n",
        "            following = self._order[len(self._done) - 1]\n",
        (f"{ISSUED}[False]",),
        refuses=True,
    ),
    Mutant(
        "nothing is gathered ahead",
        "megatron/optim/zero/gather_order.py",
        "        if self._prefetches and self._order is not None:\n",
        "        if False and self._order is not None:\n",
        (f"{ISSUED}[True]",),
    ),
    Mutant(
        "layers are gathered ahead though nobody wants it",
        "megatron/optim/zero/stage3.py",
        "prefetches=prefetches and group.size > 1",
        "prefetches=group.size > 1",
        (f"{ISSUED}[False]", BYTES),
    ),
    Mutant(
        "hashes of the order are not compared",
        "megatron/optim/zero/gather_order.py",
        "        if len({hashed for hashed, *_ in rows}) > 1:\n",
        "        if False:\n",
        (f"{HASHES}[True]",),
    ),
    Mutant(
        "one replica compares hashes of the order",
        "megatron/optim/zero/gather_order.py",
        "        if len({hashed for",
        "        if self._group.rank == 0 and len({hashed for",
        (f"{HASHES}[True]",),
        refuses=True,
    ),
    Mutant(
        "a hash does not know the order",
        "megatron/optim/zero/gather_order.py",
        "(self._hash * FACTOR + number + 2) % MODULUS",
        "(self._hash + number + 2) % MODULUS",
        (f"{HASHES}[False]",),
    ),
    Mutant(
        "replicas compare ahead of each gather whose place is known",
        "megatron/optim/zero/gather_order.py",
        "        if self._order is None:\n            self._announce(number)\n            self._look()\n",
        "        self._announce(number)\n        self._look()\n        if self._order is None:\n            pass\n",
        (f"{PREFETCH}::test_replicas_compare_once_for_each_micro_batch_whose_order_is_known",),
    ),
    Mutant(
        "who leaves the order does not say so",
        "megatron/optim/zero/gather_order.py",
        "self._start(expected, number, instead_of)",
        "self._start(expected)",
        (f"{ONE_LEAVES}[skips]",),
    ),
    Mutant(
        "who leaves the order alone goes on",
        "megatron/optim/zero/gather_order.py",
        "            self._compare(self._words(first), expected)\n",
        "            pass\n",
        (f"{PREFETCH}::test_on_a_device_who_leaves_the_order_is_told_before_anybody_waits_for_another_layer[skips]",),
    ),
    Mutant(
        "who is through alone goes on",
        "megatron/optim/zero/gather_order.py",
        "            self._look(others=None if self._reads_words else instead_of)\n",
        "            self._seen = None\n",
        (
            f"{PREFETCH}::"
            "test_on_a_device_who_leaves_the_order_is_told_before_anybody_waits_for_another_layer[is shorter]",
        ),
    ),
    Mutant(
        "nobody hears who leaves the order",
        "megatron/optim/zero/gather_order.py",
        "        return self._reads_words and self._group.size > 1 and self._order is not None\n",
        "        return False\n",
        (f"{ONE_LEAVES}[skips]",),
    ),
    Mutant(
        "an evaluation begins as if nobody expected another pass",
        "megatron/optim/zero/gather_order.py",
        "        self._is_other = last is not None and (own is None or own[0] != last[0])\n",
        "        self._is_other = False\n",
        (f"{ONE_LEAVES}[evaluates]",),
    ),
    Mutant(
        "a message that has come is kept until the next",
        "megatron/optim/zero/gather_order.py",
        "        yield gathers.pop(0)\n",
        "        yield gathers[0]\n        return\n",
        (f"{PREFETCH}::test_one_unit_is_held_beyond_what_is_in_use",),
    ),
)

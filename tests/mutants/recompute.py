"""Mistakes in recompute, where its inputs wait, and compiled layers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEPT = "tests/mpu/test_kept.py"
MODEL = "tests/models/common/test_recompute.py"
PIPE = "tests/models/common/test_pipe_recompute.py"
COMPILED = "tests/training/test_compiled.py"
IN_TDS = "tests/tds/engine/test_recompute.py"
STRUCTURES = "tests/tds/test_structures.py"
BITS = f"{MODEL}::test_recompute_leaves_the_bits_of_no_recompute[gpt2]"
BYTES = f"{MODEL}::test_a_switch_changes_memory_as_its_formula_says"
SLOTS = f"{PIPE}::test_a_stage_has_one_buffer_for_its_layers_and_the_micro_batches_in_flight[2--inputs0]"

RECOMPUTE = (
    Mutant(
        "a recomputed run draws the masks of the micro-batch that runs now",
        "megatron/mpu/random.py",
        "        with streams.at(position):\n            return function(*(given",
        "        with streams.at(streams.position):\n            return function(*(given",
        (BITS,),
    ),
    Mutant(
        "every tensor rank keeps the first rank's part",
        "megatron/mpu/activation_storage.py",
        "        part = row[group.rank * length : (group.rank + 1) * length]\n",
        "        part = row[:length]\n",
        (f"{KEPT}::test_a_rank_keeps_its_part_also_where_parts_are_not_even",),
    ),
    Mutant(
        "a part holds the whole input's memory",
        "megatron/mpu/activation_storage.py",
        "            self.held.copy_(part)\n",
        "            self.held = part\n",
        (f"{MODEL}::test_each_tensor_rank_keeps_its_part_of_the_inputs",),
    ),
    Mutant(
        "inputs stay on the device beside their copy on the host",
        "megatron/mpu/activation_storage.py",
        "            originals, self._originals = self._originals, None\n",
        "            originals, self._places = self._originals, [*self._places, self._originals]\n",
        (BYTES,),
        refuses=True,
    ),
    Mutant(
        "a buffer keeps the first input alive",
        "megatron/mpu/activation_storage.py",
        "part.new_empty(0)  # not part itself",
        "part  # not part itself",
        (BYTES,),
    ),
    Mutant(
        "a slot is given out again while its input waits",
        "megatron/mpu/activation_storage.py",
        "        place = self._free.pop()\n",
        "        place = self._free[-1]\n",
        (f"{KEPT}::test_all_slots_lie_in_one_buffer_and_are_used_again",),
    ),
    Mutant(
        "slots are never given back",
        "megatron/mpu/activation_storage.py",
        "            weakref.finalize(self, give_back).atexit = False\n",
        "            pass\n",
        (f"{KEPT}::test_all_slots_lie_in_one_buffer_and_are_used_again",),
    ),
    Mutant(
        "what all runs read is put away for each of them",
        "megatron/mpu/activation_storage.py",
        "        kept: _Kept | None = self._seen.get(x)\n",
        "        kept: _Kept | None = None\n",
        (f"{KEPT}::test_what_several_runs_read_is_put_away_once",),
    ),
    Mutant(
        "every input has a buffer of its own",
        "megatron/mpu/activation_storage.py",
        "        if key not in self._buffers:\n",
        "        if True:\n",
        (f"{KEPT}::test_all_slots_lie_in_one_buffer_and_are_used_again",),
    ),
    Mutant(
        "inputs for the host stay on the device",
        "megatron/mpu/activation_storage.py",
        "        if self.how.is_on_host:\n            return device.host_memory(",
        "        if False:\n            return device.host_memory(",
        (BYTES,),
    ),
    Mutant(
        "the buffer has room for one micro-batch",
        "megatron/models/common/pipeline.py",
        "    return runs * forwards, forwards\n",
        "    return runs, 1\n",
        (SLOTS,),
    ),
    Mutant(
        "all stages have the room of the first",
        "megatron/models/common/pipeline.py",
        "[min(module.stage_id, len(sizes.forwards_in_flight) - 1)]",
        "[0]",
        (SLOTS,),
    ),
    Mutant(
        "selective recompute recomputes nothing",
        "megatron/models/common/attention.py",
        "        self.is_recomputed = sizes.recompute_attention\n",
        "        self.is_recomputed = False\n",
        (f"{MODEL}::test_attention_alone_keeps_less_than_all_and_more_than_whole_layers[gpt2]",),
    ),
    Mutant(
        "a graph draws the masks itself",
        "megatron/training/compile.py",
        'OUTSIDE = ("attend", "recomputed")',
        'OUTSIDE = ("recomputed",)',
        (f"{COMPILED}::test_all_layers_share_the_graphs_of_one_and_no_graph_draws_masks",),
    ),
    Mutant(
        "each layer has graphs of its own",
        "megatron/training/compile.py",
        "                part.layer = torch.tensor(part.layer)",
        "                part.layer = int(part.layer)",
        (f"{COMPILED}::test_all_layers_share_the_graphs_of_one_and_no_graph_draws_masks",),
        refuses=True,
    ),
    Mutant(
        "the flag compiles nothing",
        "megatron/training/compile.py",
        "        layer.compile(backend=backend, dynamic=False)\n",
        "",
        (f"{COMPILED}::test_an_error_of_the_compiler_ends_the_run",),
        refuses=True,
    ),
    Mutant(
        "a JSON with cpu_checkpointing is not heard",
        "megatron/arguments/deepspeed_keys.py",
        '"cpu_checkpointing": Key(BOOLEAN, "checkpoint_in_cpu")',
        '"cpu_checkpointing": Key(BOOLEAN)',
        ("tests/config/test_recompute.py::test_the_section_of_the_json_says_where_inputs_wait",),
    ),
    Mutant(
        "a part that cannot be cut is cut all the same",
        "megatron/arguments/translate.py",
        "        if name in found.values and values.get(name) and t == 1:\n",
        '        if name in found.values and values.get(name) and t == 1 and name != "partition_activations":\n',
        ("tests/config/test_recompute.py::test_what_acts_on_inputs_that_nobody_keeps_is_neutral",),
    ),
    Mutant(
        "a window does not make the hysteresis whole",
        "megatron/optim/grad_scaler.py",
        "            self.scale *= 2.0\n            self.overflows_left = self.hysteresis\n",
        "            self.scale *= 2.0\n",
        ("tests/optim/test_loss_scale_rule.py",),
    ),
    Mutant(
        "gradients of bf16 are summed in bf16",
        "megatron/optim/main_params.py",
        "            self._sums[parameter] = parameter.grad.float()",
        "            self._sums[parameter] = parameter.grad.clone()",
        ("tests/optim/test_loss_scale_rule.py::test_bf16_gradients_of_256_micro_batches_are_summed_in_fp32",),
    ),
    Mutant(
        "DeepSpeed's recompute empties the inputs of a pipeline's layers",
        "tds/engine/recompute.py",
        "    if not (checkpointing.PARTITION_ACTIVATIONS or checkpointing.CPU_CHECKPOINT):\n        return False\n",
        "    return False\n",
        (f"{IN_TDS}::test_gradients_are_those_without_recompute_wherever_inputs_wait[1]",),
        refuses=True,
    ),
    Mutant(
        "each tensor rank of a pipeline keeps whole inputs",
        "tds/engine/recompute.py",
        "        if checkpointing.PARTITION_ACTIVATIONS:\n            cut =",
        "        if not checkpointing.PARTITION_ACTIVATIONS:\n            cut =",
        (f"{IN_TDS}::test_gradients_are_those_without_recompute_wherever_inputs_wait[2]",),
    ),
    Mutant(
        "a pipeline's recomputed layers draw other masks",
        "tds/engine/recompute.py",
        "            with drawing_from(states[0]), _tracking(states[1]):\n",
        "            with _tracking(states[1]):\n",
        (f"{IN_TDS}::test_masks_and_inputs_that_a_layer_changes_come_back[CPU_CHECKPOINT]",),
    ),
    Mutant(
        "a recomputed run starts from what an earlier one was given",
        "tds/engine/recompute.py",
        "        if kept is None or version != changes_of(x):\n",
        "        if kept is None:\n",
        (f"{IN_TDS}::test_a_tensor_that_a_run_changes_is_kept_for_each",),
    ),
    Mutant(
        "a recomputed run holds the inputs that wait elsewhere",
        "tds/engine/recompute.py",
        "                return function(*given.pop())\n",
        "                return function(*given[0])\n",
        (f"{IN_TDS}::test_inputs_are_let_go_and_one_that_all_runs_share_is_kept_once",),
    ),
    Mutant(
        "inputs come back in rows, however they lay",
        "tds/engine/recompute.py",
        "        if whole.stride() != self._strides:",
        "        if False:",
        (f"{IN_TDS}::test_inputs_come_back_with_their_strides",),
        refuses=True,
    ),
    Mutant(
        "recompute of our own counts as reentrant",
        "tds/engine/recompute.py",
        "    if module.activation_checkpoint_interval <= 0 or takes_the_place_of(function):\n",
        "    if module.activation_checkpoint_interval <= 0:\n",
        (f"{IN_TDS}::test_an_engine_says_whether_recompute_is_reentrant",),
    ),
    Mutant(
        "a stage's layers are given leaves",
        "tds/p2p/communicator.py",
        "        tensors = [next(with_grad) if s.needs_grad else t for",
        "        tensors = [t.requires_grad_() if s.needs_grad else t for",
        (f"{STRUCTURES}::test_stages_that_begin_with_a_layer_in_place_train_as_one_process",),
        refuses=True,
    ),
    Mutant(
        "what enters a stage is copied",
        "tds/p2p/boundary.py",
        "        return tuple(t.detach() if is_own else t.data for t in tensors)",
        "        return tuple(t.clone() for t in tensors)",
        (f"{STRUCTURES}::test_what_enters_a_stage_is_not_copied_and_may_be_changed_in_place",),
    ),
    Mutant(
        "a change of one tensor that enters counts as one of its neighbour",
        "tds/p2p/boundary.py",
        "        return tuple(t.detach() if is_own else t.data for t in tensors)",
        "        return tuple(t.detach() for t in tensors)",
        (f"{STRUCTURES}::test_what_enters_a_stage_is_not_copied_and_may_be_changed_in_place",),
        refuses=True,
    ),
    Mutant(
        "the inputs of the first stage are leaves under reentrant recompute",
        "tds/engine/micro_batches.py",
        "            return entered([copy])[0][0] if needs_grad",
        "            return copy.requires_grad_() if needs_grad",
        (f"{STRUCTURES}::test_stages_that_begin_with_a_layer_in_place_train_as_one_process",),
        refuses=True,
    ),
    Mutant(
        "DeepSpeed's buffers fill up over the forwards of an evaluation",
        "tds/engine/stage.py",
        "        if not call.is_training:\n            checkpointing.reset()",
        "        if call.is_training:\n            checkpointing.reset()",
        ("tests/tds/engine/test_evaluation.py::test_evaluation_needs_no_more_of_deepspeeds_buffers_than_one_forward",),
        refuses=True,
    ),
)

"""Mistakes in recompute, where its inputs wait, and compiled layers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KEPT = "tests/mpu/test_kept.py"
MODEL = "tests/model/test_recompute.py"
PIPE = "tests/pipe/test_recompute.py"
COMPILED = "tests/training/test_compiled.py"
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
        "megatron/mpu/kept.py",
        "        part = row[group.rank * length : (group.rank + 1) * length]\n",
        "        part = row[:length]\n",
        (f"{KEPT}::test_a_rank_keeps_its_part_also_where_parts_are_not_even",),
    ),
    Mutant(
        "a part holds the whole input's memory",
        "megatron/mpu/kept.py",
        "            self.held.copy_(part)\n",
        "            self.held = part\n",
        (f"{MODEL}::test_each_tensor_rank_keeps_its_part_of_the_inputs",),
    ),
    Mutant(
        "inputs stay on the device beside their copy on the host",
        "megatron/mpu/kept.py",
        "            originals, self._originals = self._originals, None\n",
        "            originals, self._places = self._originals, [*self._places, self._originals]\n",
        (BYTES,),
        refuses=True,
    ),
    Mutant(
        "a buffer keeps the first input alive",
        "megatron/mpu/kept.py",
        "part.new_empty(0)  # not part itself",
        "part  # not part itself",
        (BYTES,),
    ),
    Mutant(
        "a slot is given out again while its input waits",
        "megatron/mpu/kept.py",
        "        place = self._free.pop()\n",
        "        place = self._free[-1]\n",
        (f"{KEPT}::test_all_slots_lie_in_one_buffer_and_are_used_again",),
    ),
    Mutant(
        "slots are never given back",
        "megatron/mpu/kept.py",
        "            weakref.finalize(self, give_back).atexit = False\n",
        "            pass\n",
        (f"{KEPT}::test_all_slots_lie_in_one_buffer_and_are_used_again",),
    ),
    Mutant(
        "what all runs read is put away for each of them",
        "megatron/mpu/kept.py",
        "        kept: _Kept | None = self._seen.get(x)\n",
        "        kept: _Kept | None = None\n",
        (f"{KEPT}::test_what_several_runs_read_is_put_away_once",),
    ),
    Mutant(
        "every input has a buffer of its own",
        "megatron/mpu/kept.py",
        "        if key not in self._buffers:\n",
        "        if True:\n",
        (f"{KEPT}::test_all_slots_lie_in_one_buffer_and_are_used_again",),
    ),
    Mutant(
        "inputs for the host stay on the device",
        "megatron/mpu/kept.py",
        "        if self.how.is_on_host:\n            return device.host_memory(",
        "        if False:\n            return device.host_memory(",
        (BYTES,),
    ),
    Mutant(
        "the buffer has room for one micro-batch",
        "megatron/pipe/recompute.py",
        "    return runs * forwards, forwards\n",
        "    return runs, 1\n",
        (SLOTS,),
    ),
    Mutant(
        "all stages have the room of the first",
        "megatron/pipe/recompute.py",
        "[min(module.stage_id, len(sizes.forwards_in_flight) - 1)]",
        "[0]",
        (SLOTS,),
    ),
    Mutant(
        "selective recompute recomputes nothing",
        "megatron/model/attention.py",
        "        self.is_recomputed = sizes.recompute_attention\n",
        "        self.is_recomputed = False\n",
        (f"{MODEL}::test_attention_alone_keeps_less_than_all_and_more_than_whole_layers[gpt2]",),
    ),
    Mutant(
        "a graph draws the masks itself",
        "megatron/training/compiled.py",
        'OUTSIDE = ("attend", "drop", "recomputed")',
        'OUTSIDE = ("drop", "recomputed")',
        (f"{COMPILED}::test_all_layers_share_the_graphs_of_one_and_no_graph_draws_masks",),
    ),
    Mutant(
        "each layer has graphs of its own",
        "megatron/training/compiled.py",
        "                part.layer = torch.tensor(part.layer)",
        "                part.layer = int(part.layer)",
        (f"{COMPILED}::test_all_layers_share_the_graphs_of_one_and_no_graph_draws_masks",),
        refuses=True,
    ),
    Mutant(
        "the flag compiles nothing",
        "megatron/training/compiled.py",
        "        layer.compile(backend=backend, dynamic=False)\n",
        "",
        (f"{COMPILED}::test_an_error_of_the_compiler_ends_the_run",),
        refuses=True,
    ),
    Mutant(
        "a JSON with cpu_checkpointing is not heard",
        "megatron/config/deepspeed_keys.py",
        '"cpu_checkpointing": Key(BOOLEAN, "checkpoint_in_cpu")',
        '"cpu_checkpointing": Key(BOOLEAN)',
        ("tests/config/test_recompute.py::test_the_section_of_the_json_says_where_inputs_wait",),
    ),
    Mutant(
        "a part that cannot be cut does nothing and is not told",
        "megatron/config/effects.py",
        '    elif "partition_activations" in config.given and config.parallel.model_parallel_size == 1:\n',
        '    elif "partition_activations" in config.given and config.parallel.model_parallel_size == 0:\n',
        ("tests/config/test_recompute.py::test_what_cannot_act_is_refused",),
        refuses=True,
    ),
    Mutant(
        "a window does not make the hysteresis whole",
        "megatron/optim/scaler.py",
        "            self.scale *= 2.0\n            self.overflows_left = self.hysteresis\n",
        "            self.scale *= 2.0\n",
        ("tests/optim/test_loss_scale_rule.py",),
    ),
    Mutant(
        "gradients of bf16 are summed in bf16",
        "megatron/optim/gradients.py",
        "            self._sums[parameter] = parameter.grad.float()",
        "            self._sums[parameter] = parameter.grad.clone()",
        ("tests/optim/test_loss_scale_rule.py::test_bf16_gradients_of_256_micro_batches_are_summed_in_fp32",),
    ),
)

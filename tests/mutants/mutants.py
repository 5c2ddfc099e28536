"""Mistakes that a training code can make in silence, each as a change of one text, with the tests that must see it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """In ``file``, ``old`` (there exactly once) becomes ``new``; one of ``tests`` must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PIPELINE = "tests/tds/test_parity.py::test_fp32_equals_one_process_to_the_bit[2]"
EXCHANGE = "tests/tds/test_exchange.py::test_every_structure_crosses_in_both_directions_with_any_number_of_chunks"
TIED = "tests/tds/test_parity.py::test_fp64_tied_weights_equal_one_process[2]"
NORM = "tests/mpu/test_grads.py::test_replicated_cut_and_tied_parameters_count_once"
STEP = "tests/optim/test_mixed_precision.py"
LINEAR = "tests/mpu/test_layers.py::test_column_then_row_equals_two_linears"
EMBEDDING = "tests/mpu/test_vocabulary.py::test_embedding_equals_torch_and_padded_rows_get_no_gradient"
ENTROPY = "tests/mpu/test_vocabulary.py::test_cross_entropy_equals_torch_and_padded_columns_get_no_probability"
MASKS = "tests/mpu/test_random.py"
LAYOUTS = "tests/parity/test_layouts.py"
BITS = "tests/parity/test_schedules.py::test_schedules_differ_in_no_bit"
CHUNKS = "tests/tds/test_parity.py::test_chunks_equal_one_process_to_the_bit"
RESUME = "tests/training/test_resume.py::test_killed_and_resumed_run_is_bit_for_bit_the_same"
SUMS = "tests/tds/test_reduction.py"
FP16 = "tests/training/test_loss_scale.py"
LOOP = "tests/training/test_loop.py"
OVERFLOW = "tests/tds/test_optimizers.py::test_an_overflow_on_one_stage_skips_the_same_step_on_all_with_one_scale"

GRADIENTS = (
    Mutant(
        "gradients of stage 0 are divided by the number of micro-batches",
        "tds/train_step.py",
        "data_group, factor)",
        "data_group, factor / (engine.micro_batches if engine.stage_id == 0 else 1))",
        (PIPELINE,),
    ),
    Mutant(
        "all gradients of a pipeline are multiplied by the number of micro-batches",
        "tds/train_step.py",
        "data_group, factor)",
        "data_group, factor * engine.micro_batches)",
        (PIPELINE,),
    ),
    Mutant(
        "one stage divides by the number of micro-batches again",
        "megatron/training/engines.py",
        "scale_wrt_gas=False",
        "scale_wrt_gas=True",
        (f"{LAYOUTS}::test_micro_batches_may_be_cut_otherwise[]",),
    ),
    Mutant(
        "gradients are divided by the replicas once more",
        "megatron/training/engines.py",
        "self.grid.data.handle, agreement.factor)\n",
        "self.grid.data.handle, agreement.factor / self.grid.data.size)\n",
        (f"{LAYOUTS}::test_two_replicas_are_bitwise_the_sum_in_rank_order",),
    ),
    Mutant(
        "gradients are not summed over the replicas",
        "megatron/training/engines.py",
        "self.optimizer.gradients()], self.grid.data.handle, agreement.factor)",
        "self.optimizer.gradients()], None, agreement.factor)",
        (f"{LAYOUTS}::test_two_replicas_are_bitwise_the_sum_in_rank_order",),
    ),
    Mutant(
        "tied gradients are not summed",
        "tds/gradients.py",
        "            dist.all_reduce(summed, group=group)\n",
        "            pass\n",
        (TIED,),
    ),
    Mutant(
        "tied gradients are summed twice",
        "tds/gradients.py",
        "            dist.all_reduce(summed, group=group)\n",
        "            dist.all_reduce(summed, group=group)\n            dist.all_reduce(summed, group=group)\n",
        (TIED,),
    ),
    Mutant(
        "16-bit gradients are accumulated in 16 bits",
        "megatron/optim/mixed_precision.py",
        "            master.grad.add_(parameter.grad)\n",
        "            master.grad = (master.grad.to(parameter.dtype) + parameter.grad).float()\n",
        (f"{STEP}::test_many_tiny_gradients_add_up_in_fp32",),
    ),
    Mutant(
        "the mean of means is taken, in one stage",
        "megatron/training/engines.py",
        "            share = meter.add(as_weighted(loss), micro_batch)\n",
        "            share = meter.add(loss[0] / loss[1], micro_batch)\n",
        (f"{LAYOUTS}::test_micro_batches_may_be_cut_otherwise[--eod-mask-loss --reset-attention-mask]",),
    ),
    Mutant(
        "the mean of means is taken, in a pipeline",
        "tds/loss.py",
        "    if isinstance(loss, torch.Tensor) or is_weighted(loss):\n",
        "    if is_weighted(loss):\n"
        "        loss = loss.total / loss.count\n"
        "    if isinstance(loss, torch.Tensor) or is_weighted(loss):\n",
        ("tests/tds/test_parity.py::test_two_replicas_equal_one_process_over_both_their_batches",),
    ),
    Mutant(
        "tied gradients are not summed under ZeRO",
        "tds/train_step.py",
        "    sum_tied(engine.module.get_tied_weights_and_groups(), gradients.of, dtype)\n",
        "    if not engine.zero_optimization():\n"
        "        sum_tied(engine.module.get_tied_weights_and_groups(), gradients.of, dtype)\n",
        ("tests/tds/test_optimizers.py::test_zero_1_is_zero_0_to_the_bit_over_20_steps",),
    ),
    Mutant(
        "an overflow on one stage is not told to the others, under ZeRO",
        "tds/optimizers.py",
        '        self._name = "grad_accum" if',
        '        optimizer.model_parallel_group = None\n        self._name = "grad_accum" if',
        (OVERFLOW,),
    ),
    Mutant(
        "the norm counts tied weights twice, in fp16",
        "tds/optimizers.py",
        '("ds_pipe_replicated", "model_parallel", "tensor_model_parallel")',
        "()",
        (OVERFLOW,),
    ),
    Mutant(
        "the loss is not scaled, but the gradients are unscaled",
        "tds/optimizers.py",
        "        return 1.0 if scale is None else float(scale)\n",
        "        return 1.0\n",
        (OVERFLOW,),
    ),
    Mutant(
        "gradients of a batch that was stopped are added to the next one's",
        "tds/train_step.py",
        "        engine.zero_grad()\n        if gradients is not None:\n            gradients.forget()\n",
        "",
        ("tests/tds/test_optimizers.py::test_a_batch_that_on_loss_stops_leaves_nothing_to_the_next",),
    ),
    Mutant(
        "evaluation moves the count of forwards that seeds layers",
        "tds/evaluation.py",
        ", forwards_uncounted(module):",
        ":",
        ("tests/tds/test_evaluation.py::test_evaluation_between_steps_changes_nothing_in_training",),
    ),
)

NORMS = (
    Mutant(
        "the norm counts tied weights twice",
        "megatron/mpu/grads.py",
        '    if getattr(parameter, "ds_pipe_replicated", False):\n        return False\n',
        "",
        (NORM,),
    ),
    Mutant(
        "the norm counts tied weights twice, in the pipeline engine's own clipping",
        "tds/norm.py",
        '    if getattr(parameter, "ds_pipe_replicated", False):\n        return False\n',
        "",
        (TIED,),
    ),
    Mutant(
        "the norm counts what all tensor ranks hold on each",
        "megatron/mpu/grads.py",
        "    return tensor_rank == 0 or shard_of(parameter).is_partitioned\n",
        "    return True\n",
        (NORM,),
    ),
    Mutant(
        "the norm is taken per stage",
        "megatron/optim/mixed_precision.py",
        "global_norm(counted, model=self.model_group, device=device)",
        "global_norm(counted, model=self.tensor_group, device=device)",
        (f"{STEP}::test_norm_and_clipped_steps_over_two_stages_of_two_ranks_equal_one_process",),
    ),
    Mutant(
        "each replica clips before the sum, in one stage",
        "megatron/training/engines.py",
        "        reduce_gradients([g for _, g in self.optimizer.gradients()], self.grid.data.handle, "
        "agreement.factor)\n",
        "        own, scale = [g for _, g in self.optimizer.gradients()], agreement.factor\n"
        "        norm = scale * self.grid.data.size * sum(float(g.square().sum()) for g in own) ** 0.5\n"
        "        torch._foreach_mul_(own, min(1.0, self.optimizer.clip_grad / norm))\n"
        "        reduce_gradients(own, self.grid.data.handle, scale)\n",
        (f"{LAYOUTS}::test_fp64_equals_one_process[1-1-2]",),
    ),
    Mutant(
        "each replica clips before the sum, in a pipeline",
        "tds/train_step.py",
        "    engine._force_grad_boundary = True\n",
        "    engine._force_grad_boundary = True\n    clip_gradients(engine, gradients)\n",
        ("tests/tds/test_tensor_group.py::test_the_norm_counts_cut_and_whole_parameters_once_and_clips_by_it",),
    ),
    Mutant(
        "weight decay reaches norms and biases under tensor parallelism",
        "megatron/optim/param_groups.py",
        "    groups = decay_groups(parameters, weight_decay)\n",
        "    groups = decay_groups(parameters, weight_decay)\n"
        "    groups[-1]['weight_decay'] = weight_decay if tensor.size > 1 else 0.0\n",
        (f"{LAYOUTS}::test_fp64_equals_one_process[2-1-1]",),
    ),
    Mutant(
        "the updated masters do not reach the 16-bit weights",
        "megatron/optim/mixed_precision.py",
        "            self.copy_masters_to_parameters()\n",
        "            pass\n",
        (f"{STEP}::test_many_tiny_updates_move_a_bf16_weight",),
    ),
    Mutant(
        "the norm includes the loss scale",
        "megatron/optim/mixed_precision.py",
        "        norm = self._norm() / self.loss_scale\n",
        "        norm = self._norm()\n",
        (f"{STEP}::test_the_loss_scale_leaves_no_trace",),
    ),
    Mutant(
        "the update includes the loss scale",
        "megatron/optim/mixed_precision.py",
        "clip_coefficient(norm, self.clip_grad) / self.loss_scale)",
        "clip_coefficient(norm, self.clip_grad))",
        (f"{STEP}::test_the_loss_scale_leaves_no_trace",),
    ),
    Mutant(
        "a pipeline's backward leaves out the loss scale",
        "tds/stage.py",
        "        scaled = share if call.loss_scale == 1.0 else share * call.loss_scale\n",
        "        scaled = share\n",
        (f"{FP16}::test_fp16_that_skips_nothing_trains_as_fp32_does[1-2-1]",),
    ),
)

TENSOR = (
    Mutant(
        "column-parallel backward has no all-reduce",
        "megatron/mpu/mappings.py",
        "        return all_reduce(grads[0].contiguous().clone(), ctx.group), None\n",
        "        return grads[0], None\n",
        (LINEAR,),
    ),
    Mutant(
        "row-parallel backward has an all-reduce",
        "megatron/mpu/mappings.py",
        "        return all_reduce(x.contiguous().clone(), group)\n\n"
        "    @staticmethod\n    def backward(ctx: Any, *grads: torch.Tensor) -> Any:\n        return grads[0], None\n",
        "        ctx.group = group\n        return all_reduce(x.contiguous().clone(), group)\n\n"
        "    @staticmethod\n    def backward(ctx: Any, *grads: torch.Tensor) -> Any:\n"
        "        return all_reduce(grads[0].contiguous().clone(), ctx.group), None\n",
        (LINEAR,),
    ),
    Mutant(
        "the row-parallel bias is added on every rank",
        "megatron/mpu/layers.py",
        "reduce_from_tensor_region(F.linear(x, self.weight), self.group)",
        "reduce_from_tensor_region(F.linear(x, self.weight, self.bias), self.group)",
        (LINEAR,),
    ),
    Mutant(
        "the embedding's first token is one too high",
        "megatron/mpu/layers.py",
        "        local = tokens - self.start\n",
        "        local = tokens - self.start - min(self.group.rank, 1)\n",
        (EMBEDDING,),
    ),
    Mutant(
        "the loss's first token is one too high",
        "megatron/mpu/cross_entropy.py",
        "        local = targets - start\n",
        "        local = targets - start - min(group.rank, 1)\n",
        (ENTROPY,),
    ),
    Mutant(
        "padded rows of the vocabulary take part in the softmax",
        "megatron/mpu/cross_entropy.py",
        "    real = logits[..., :num_real] if logits.shape[-1] != num_real else logits\n",
        "    real = logits\n",
        (ENTROPY,),
    ),
    Mutant(
        "queries, keys and values of all heads lie together, so that a cut mixes them",
        "megatron/model/attention.py",
        ".view(s, b, self.num_heads, 3, self.head_size)",
        ".view(s, b, 3, self.num_heads, self.head_size).transpose(2, 3)",
        ("tests/model/test_gpt2.py::test_tensor_ranks_together_equal_one_process[plain-2]",),
    ),
    Mutant(
        "each tensor rank starts from numbers of its own",
        "megatron/model/init.py",
        "        block = _block(name, seed, first, last - first, shard.global_shape[1:]) * std\n",
        "        block = _block(name, seed + shard.start, first, last - first, shard.global_shape[1:]) * std\n",
        ("tests/model/test_init.py::test_a_model_starts_from_the_same_values_on_any_number_of_tensor_ranks",),
    ),
)

DROPOUT = (
    Mutant(
        "tensor ranks drop the same elements of their slices",
        "megatron/mpu/random.py",
        "        tensor_rank = self.tensor_rank if is_cut else -1\n",
        "        tensor_rank = -1\n",
        (f"{MASKS}::test_tensor_ranks_differ_where_the_tensor_is_cut",),
    ),
    Mutant(
        "attention does not say that its heads are cut",
        "megatron/model/attention.py",
        "is_cut=self.is_cut",
        "is_cut=False",
        ("tests/model/test_dropout.py::test_tensor_ranks_drop_the_same_hidden_states_and_different_attention",),
    ),
    Mutant(
        "tensor ranks drop other elements of what all hold",
        "megatron/mpu/random.py",
        "        tensor_rank = self.tensor_rank if is_cut else -1\n",
        "        tensor_rank = self.tensor_rank\n",
        (f"{MASKS}::test_tensor_ranks_share_the_mask_of_what_they_all_hold",),
    ),
    Mutant(
        "all replicas drop the same elements",
        "megatron/mpu/random.py",
        "        self.data_rank = data.rank\n",
        "        self.data_rank = 0\n",
        (f"{MASKS}::test_every_other_difference_of_place_gives_another_mask",),
    ),
    Mutant(
        "a run does not tell its dropout which replica it is",
        "megatron/training/run.py",
        "DropoutStreams(config.run.seed, here.grid.data, here.grid.tensor)",
        "DropoutStreams(config.run.seed, tensor=here.grid.tensor)",
        (f"{LOOP}::test_a_run_draws_dropout_by_seed_replica_and_tensor_rank",),
    ),
    Mutant(
        "a pipeline's micro-batches all drop the same elements",
        "megatron/training/engines.py",
        "        self.streams.position = Position(self._step, micro_batch)\n",
        "        self.streams.position = Position(self._step, 0)\n",
        (f"{LAYOUTS}::test_pipeline_draws_the_dropout_masks_of_one_process",),
    ),
    Mutant(
        "recompute draws the masks of the micro-batch that runs now",
        "megatron/mpu/random.py",
        "        with streams.at(position):\n",
        "        with streams.at(streams.position):\n",
        (f"{MASKS}::test_recomputing_draws_the_same_masks_even_when_the_position_has_moved_on",),
    ),
    Mutant(
        "evaluation in one stage drops elements",
        "megatron/training/engines.py",
        "        self.engine.eval()\n",
        "        self.engine.train()\n",
        (f"{LOOP}::test_evaluation_drops_nothing",),
    ),
    Mutant(
        "evaluation in a pipeline drops elements",
        "tds/engine.py",
        "            self.module.eval()\n",
        "            self.module.train()\n",
        (f"{LOOP}::test_evaluation_drops_nothing",),
    ),
)

RESUMED = (
    Mutant(
        "random states are not restored",
        "megatron/training/state.py",
        "    device.set_rng_states(states)\n",
        "    del states\n",
        (f"{RESUME}[1-1-2]",),
    ),
    Mutant(
        "every rank restores the random state of rank 0",
        "megatron/training/state.py",
        '        name = f"rng/{kind}/{world.rank:05d}"\n',
        '        name = f"rng/{kind}/{0:05d}"\n',
        (f"{RESUME}[1-1-2]",),
    ),
    Mutant(
        "the data goes on some micro-batches too late",
        "megatron/training/loop.py",
        "run.world, run.progress.samples_consumed)",
        "run.world, run.progress.samples_consumed + (config.batch.gas if run.progress.step else 0))",
        (f"{RESUME}[1-1-1]",),
    ),
    Mutant(
        "consumed samples leave out the accumulation",
        "megatron/training/loop.py",
        "    progress.samples_consumed += run.config.batch.global_batch_size(run.world.grid.data.size)\n",
        "    progress.samples_consumed += run.config.batch.batch_size * run.world.grid.data.size\n",
        (f"{LOOP}::test_a_skipped_step_counts_its_samples_but_holds_the_learning_rate",),
    ),
    Mutant(
        "Adam's step count is not restored",
        "megatron/training/state.py",
        '        _set_optimizer_steps(optimizer, checkpoint.state["optimizer_steps"])\n',
        "",
        (f"{RESUME}[1-1-1]",),
    ),
    Mutant(
        "the loss scale is not restored",
        "megatron/training/state.py",
        '        optimizer.scaler.load(checkpoint.state["scaler"])\n',
        "",
        (f"{FP16}::test_loss_scale_and_counters_survive_a_stop[9]",),
    ),
    Mutant(
        "tensor ranks load each other's slices",
        "megatron/checkpoint/loading.py",
        "        wanted = spans(shard)\n",
        "        sizes = self.shape(name)\n"
        "        wanted = [(n - b, n - a) for (a, b), n in zip(spans(shard), sizes, strict=True)]\n",
        ("tests/checkpoint/test_layouts.py::test_any_tensor_size_reads_what_any_other_saved[2]",),
    ),
    Mutant(
        "16-bit weights do not follow the masters that were loaded",
        "megatron/training/state.py",
        "    optimizer.copy_masters_to_parameters()\n",
        "",
        (f"{FP16}::test_loss_scale_and_counters_survive_a_stop[9]",),
    ),
)

STEPS = (
    Mutant(
        "the learning rate advances on a skipped step",
        "megatron/training/loop.py",
        "    progress.updates += 0 if result.is_skipped else 1\n",
        "    progress.updates += 1\n",
        (f"{LOOP}::test_a_skipped_step_counts_its_samples_but_holds_the_learning_rate",),
    ),
    Mutant(
        "an overflow is seen on its own rank only",
        "megatron/optim/mixed_precision.py",
        "        self.overflow = not math.isfinite(norm)\n",
        "        self.overflow = not all(bool(g.isfinite().all()) for _, g in self.gradients())\n",
        (f"{FP16}::test_an_overflow_on_one_rank_is_seen_by_all",),
    ),
    Mutant(
        "a run has only the overflows of its own stage",
        "megatron/training/assembly.py",
        "        model=world.grid.model,\n",
        "        model=world.grid.tensor,\n",
        (f"{FP16}::test_an_overflow_on_one_rank_is_seen_by_all",),
    ),
    Mutant(
        "backward takes the newest micro-batch instead of its own",
        "tds/stage.py",
        "        state = self._in_flight.pop(_key(action))\n",
        "        state = self._in_flight.pop(max(self._in_flight))\n",
        (PIPELINE,),
    ),
    Mutant(
        "a receive buffer is used again while its activations are in flight",
        "tds/exchange.py",
        "        return layout.new_buffer(self.links.device)\n",
        "        kept = self.__dict__.setdefault('_kept', {})\n"
        "        return kept.setdefault((kind, layout.num_bytes), layout.new_buffer(self.links.device))\n",
        (PIPELINE,),
    ),
    Mutant(
        "a mask of booleans arrives in 16 bits",
        "tds/wire.py",
        "            tensors.append(piece.view(spec.dtype).view(spec.shape).data)\n",
        "            got = piece.view(spec.dtype).view(spec.shape).data\n"
        "            tensors.append(got.half() if spec.dtype is torch.bool else got)\n",
        ("tests/tds/test_wire.py::test_header_and_message_come_back_as_they_were", PIPELINE),
    ),
    Mutant(
        "the gradient of a second tensor is lost between stages",
        "tds/stage.py",
        "t.grad for t in state.leaves]\n",
        "t.grad * (t is state.leaves[0]) for t in state.leaves]\n",
        (PIPELINE,),
    ),
    Mutant(
        "two tensors of a message change places",
        "tds/wire.py",
        "        return tensors\n",
        "        same = len(tensors) > 1 and tensors[0].shape == tensors[-1].shape\n"
        "        return tensors[::-1] if same and tensors[0].dtype is tensors[-1].dtype else tensors\n",
        (EXCHANGE, PIPELINE),
    ),
    Mutant(
        "the elements that do not divide over the tensor group stay behind",
        "tds/wire.py",
        "                numel = -(-numel // cut.size)\n",
        "                numel = numel // cut.size\n",
        ("tests/tds/test_wire.py::test_header_and_message_come_back_as_they_were",),
    ),
    Mutant(
        "a dict crosses a stage in the order of its names",
        "tds/structure.py",
        "        return dict(zip(self.keys, tensors, strict=True))\n",
        "        return dict(zip(sorted(self.keys), tensors, strict=True))\n",
        (EXCHANGE,),
    ),
    Mutant(
        "a rank that is asked to stop stops alone",
        "megatron/training/loop.py",
        "    if all_reduce(vote, run.world.grid.world, dist.ReduceOp.MAX).item() == 0.0:\n",
        "    if reason is None:\n",
        (f"{LOOP}::test_all_ranks_stop_together_or_none",),
    ),
)

DATA = (
    Mutant(
        "replicas read the same samples",
        "megatron/training/data.py",
        "                data_rank=world.grid.data.rank,\n",
        "                data_rank=0,\n",
        (f"{LAYOUTS}::test_two_replicas_are_bitwise_the_sum_in_rank_order",),
    ),
    Mutant(
        "micro-batches are read in another order",
        "megatron/data/batches.py",
        "start + own + micro_batch * self.micro_batch_size\n",
        "start + own + (self.num_micro_batches - 1 - micro_batch) * self.micro_batch_size\n",
        ("tests/data/test_batches.py::test_global_batches_are_the_same_in_every_layout",),
    ),
    Mutant(
        "the last stage reads other labels than the first reads tokens",
        "megatron/training/data.py",
        "                samples_consumed=samples_consumed,\n",
        "                samples_consumed=samples_consumed + world.grid.pipe.rank,\n",
        (f"{LAYOUTS}::test_tied_pipeline_differs_in_the_tied_weight_alone",),
    ),
    Mutant(
        "labels are the tokens themselves",
        "megatron/data/fields.py",
        "tokens[:, 1:].contiguous()",
        "tokens[:, :-1].contiguous()",
        ("tests/data/test_fields.py::test_documents_are_told_apart",),
    ),
    Mutant(
        "an end-of-document token belongs to the next document",
        "megatron/data/fields.py",
        "    return ended.cumsum(dim=1, dtype=torch.int32) - ended\n",
        "    return ended.cumsum(dim=1, dtype=torch.int32)\n",
        ("tests/data/test_fields.py::test_documents_are_told_apart",),
    ),
    Mutant(
        "positions start anew one token late",
        "megatron/data/fields.py",
        "torch.where(is_eod[:, :-1], positions[:, 1:], 0)",
        "torch.where(is_eod[:, :-1], positions[:, :-1], 0)",
        ("tests/data/test_fields.py::test_documents_are_told_apart",),
    ),
    Mutant(
        "the mask of documents shows the next token",
        "megatron/ops/attention.py",
        "    return same.tril().unsqueeze(1)\n",
        "    return same.tril(1).unsqueeze(1)\n",
        ("tests/ops/test_attention.py::test_a_document_mask_is_causal_within_documents",),
    ),
    Mutant(
        "attention without a mask sees all tokens",
        "megatron/ops/attention.py",
        "is_causal=mask is None",
        "is_causal=False",
        ("tests/ops/test_attention.py::test_no_position_sees_a_later_one",),
    ),
    Mutant(
        "every epoch has the same order",
        "megatron/data/gpt2_samples.py",
        'Permutation(num_samples, "samples", seed, epoch)',
        'Permutation(num_samples, "samples", seed, 0)',
        ("tests/data/test_gpt2_samples.py::test_samples_equal_the_reference",),
    ),
)

STAGES = (
    Mutant(
        "the gradient that a stage sends back is divided by the accumulation steps",
        "tds/stage.py",
        "            self.exchange.send_gradients(outgoing, returned)\n",
        "            self.exchange.send_gradients(outgoing, [g / call.meter.num_micro_batches for g in returned])\n",
        (PIPELINE,),
    ),
    Mutant(
        "the first stage runs its second chunk in place of its third, and the other way round",
        "tds/stage.py",
        "self.module(inputs, action.chunk)",
        "self.module(inputs, (0, 2, 1)[action.chunk] if self.index == 0 else action.chunk)",
        (f"{CHUNKS}[2-3]",),
    ),
    Mutant(
        "one of the weight gradients that are put off is lost",
        "tds/split.py",
        "        every = self._put_off.pop(key)\n",
        "        every = self._put_off.pop(key)[1:]\n",
        (f"{BITS}[--pipeline-schedule zb-h1]",),
    ),
    Mutant(
        "the samples of a micro-batch change places in the gradient that comes back",
        "tds/stage.py",
        "                    torch.autograd.backward(state.edges, arrived)\n",
        "                    torch.autograd.backward(state.edges, [a.flip(0) for a in arrived])\n",
        (f"{CHUNKS}[2-2]",),
    ),
)

OVERLAP = (
    Mutant(
        "a weight of no layer is not added up over the replicas",
        "tds/reduction.py",
        "if holders[p] != 1}",
        "if holders[p] > 1}",
        (f"{SUMS}::test_what_is_of_no_layer_or_of_two_chunks_is_added_up_once_all_have_added_to_it[1-1]",),
    ),
    Mutant(
        "sums over the replicas start in the first backward of a chunk, not the last",
        "tds/call.py",
        "{a.chunk: a for a in actions if",
        "{a.chunk: a for a in reversed(actions) if",
        ("tests/tds/test_parity.py::test_two_replicas_equal_one_process_over_both_their_batches",),
    ),
    Mutant(
        "one replica starts two sums in the other order",
        "tds/reduction.py",
        "        self._bucket_of = {",
        "        self._buckets[:2] = self._buckets[1::-1] if dist.get_rank() == 1 else self._buckets[:2]\n"
        "        self._bucket_of = {",
        (f"{SUMS}::test_sums_start_while_the_backward_still_runs[False]",),
    ),
    Mutant(
        "a sender's limit is one with which the schedule stands still",
        "tds/window.py",
        "            window *= 2\n",
        "            return window\n",
        ("tests/tds/test_window.py::test_a_schedule_that_would_stand_still_gets_a_larger_limit",),
    ),
)

MUTANTS = (*GRADIENTS, *NORMS, *TENSOR, *DROPOUT, *RESUMED, *STEPS, *DATA, *STAGES, *OVERLAP)

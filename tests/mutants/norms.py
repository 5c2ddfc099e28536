"""Mistakes in the gradient norm and the clip."""

from __future__ import annotations

from tests.mutants.mutant import FP16, LAYOUTS, NORM, STEP, TIED, Mutant

SQUARES = "tests/tds/test_grads.py::test_squares_add_up_in_fp64_however_many_they_are"

ON_A_DEVICE = "tests/tds/test_grads.py::test_on_a_device_the_norms_of_all_gradients_of_a_type_are_one_call"

NORMS = (
    Mutant(
        "on a device norms are added up in place of their squares",
        "tds/gradients.py",
        "torch.stack(same).double().square().sum() for same",
        "torch.stack(same).double().sum() for same",
        (ON_A_DEVICE,),
    ),
    Mutant(
        "on a device gradients of 16 bits add up in 16 bits",
        "tds/gradients.py",
        "torch_api.norms_of_all(same, accurate_dtype(dtype))",
        "torch_api.norms_of_all(same, dtype)",
        (ON_A_DEVICE,),
    ),
    Mutant(
        "squares of a large gradient add up in one sum of fp32",
        "tds/gradients.py",
        "    dtype = accurate_dtype(x.dtype)\n    if x.numel() < LARGE:",
        "    dtype = accurate_dtype(x.dtype)\n    if x.numel() >= 0:",
        (f"{SQUARES}[(4000003,)-float32]",),
    ),
    Mutant(
        "the last numbers of a gradient are not in its norm",
        "tds/gradients.py",
        " + rest.double().square()",
        "",
        (f"{SQUARES}[(66001,)-float32]",),
    ),
    Mutant(
        "the norm is that of one rank",
        "tds/gradients.py",
        "            dist.all_reduce(squared, group=group)\n",
        "            pass\n",
        (NORM,),
    ),
    Mutant(
        "the pipeline engine's own norm is that of one rank",
        "tds/engine/engine.py",
        "global_norm(counted, [engine.grid.get_model_parallel_group()], engine.device)",
        "global_norm(counted, [], engine.device)",
        ("tests/tds/p2p/test_tensor_group.py::test_the_norm_counts_cut_and_whole_parameters_once_and_clips_by_it",),
    ),
    Mutant(
        "the norm counts tied weights twice",
        "tds/gradients.py",
        '    if getattr(parameter, "ds_pipe_replicated", False):\n        return False\n',
        "",
        (NORM,),
    ),
    Mutant(
        "the norm counts tied weights twice, in the pipeline engine's own clipping",
        "tds/gradients.py",
        '    if getattr(parameter, "ds_pipe_replicated", False):\n        return False\n',
        "",
        (TIED,),
    ),
    Mutant(
        "the norm counts what all tensor ranks hold on each",
        "tds/gradients.py",
        "    return tensor_rank == 0 or bool(is_partitioned)\n",
        "    return True\n",
        (NORM,),
    ),
    Mutant(
        "the norm is taken per stage",
        "megatron/optim/optimizer.py",
        "[self.gradient_holders.handle, self.model_group.handle]",
        "[self.gradient_holders.handle, self.tensor_group.handle]",
        (f"{STEP}::test_norm_and_clipped_steps_over_two_stages_of_two_ranks_equal_one_process",),
    ),
    Mutant(
        "each replica clips before the sum, in one stage",
        "tds/gradient_reducer.py",
        "            gradients = [self._gradient_of(p) for p in bucket]\n",
        "            gradients = [self._gradient_of(p) for p in bucket]\n"
        "            for own in gradients:\n"
        "                own.div_(own.norm().clamp(min=1e-3))\n",
        (f"{LAYOUTS}::test_fp64_equals_one_process[1-1-2]",),
    ),
    Mutant(
        "each replica clips before the sum, in a pipeline",
        "tds/engine/engine.py",
        "    engine._force_grad_boundary = True\n",
        "    engine._force_grad_boundary = True\n    clip_gradients(engine, gradients)\n",
        ("tests/tds/p2p/test_tensor_group.py::test_the_norm_counts_cut_and_whole_parameters_once_and_clips_by_it",),
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
        "megatron/optim/optimizer.py",
        "            self.copy_masters_to_parameters()\n",
        "            pass\n",
        (f"{STEP}::test_many_tiny_updates_move_a_bf16_weight",),
    ),
    Mutant(
        "the norm includes the loss scale",
        "megatron/optim/optimizer.py",
        "(self.norm_of_sums().item() if self.raw_norm is None else self.raw_norm) * self.last_factor\n",
        "(self.norm_of_sums().item() if self.raw_norm is None else self.raw_norm)\n",
        (f"{STEP}::test_the_loss_scale_leaves_no_trace",),
    ),
    Mutant(
        "the update includes the loss scale",
        "megatron/optim/optimizer.py",
        "clip_coefficient(norm, self.clip_grad) * self.last_factor)",
        "clip_coefficient(norm, self.clip_grad))",
        (f"{STEP}::test_the_loss_scale_leaves_no_trace",),
    ),
    Mutant(
        "a pipeline's backward leaves out the loss scale",
        "tds/engine/stage.py",
        "        scaled = share if call.loss_scale == 1.0 else share * call.loss_scale\n",
        "        scaled = share\n",
        (f"{FP16}::test_fp16_that_skips_nothing_trains_as_fp32_does[1-2-1]",),
    ),
)

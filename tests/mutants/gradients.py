"""Mistakes in scaled, lost or summed twice."""

from __future__ import annotations

from tests.mutants.mutant import LAYOUTS, OVERFLOW, PIPELINE, STEP, TIED, Mutant

GRADIENTS = (
    Mutant(
        "gradients of stage 0 are divided by the number of micro-batches",
        "tds/engine/engine.py",
        "data_group, factor)",
        "data_group, factor / (engine.micro_batches if engine.stage_id == 0 else 1))",
        (PIPELINE,),
    ),
    Mutant(
        "all gradients of a pipeline are multiplied by the number of micro-batches",
        "tds/engine/engine.py",
        "data_group, factor)",
        "data_group, factor * engine.micro_batches)",
        (PIPELINE,),
    ),
    Mutant(
        "one stage divides by the number of micro-batches again",
        "megatron/training/train_step.py",
        "scale_wrt_gas=False",
        "scale_wrt_gas=True",
        (f"{LAYOUTS}::test_micro_batches_may_be_cut_otherwise[]",),
    ),
    Mutant(
        "gradients are divided by the replicas once more",
        "megatron/training/train_step.py",
        "            self.optimizer.scale_gradients(1.0)\n",
        "            self.optimizer.scale_gradients(1.0 / self.grid.data.size)\n",
        (f"{LAYOUTS}::test_two_replicas_are_bitwise_the_sum_in_rank_order",),
    ),
    Mutant(
        "gradients are not summed over the replicas",
        "tds/gradient_reducer.py",
        "        for bucket in ready:\n            if self._scatter",
        "        for bucket in []:\n            if self._scatter",
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
        "megatron/optim/main_params.py",
        "            self._sums[parameter].add_(parameter.grad)  # type: ignore[index]\n",
        "            total = self._sums[parameter].to(parameter.dtype) + parameter.grad\n"
        "            self._sums[parameter] = total.float()\n",
        (f"{STEP}::test_many_tiny_gradients_add_up_in_fp32",),
    ),
    Mutant(
        "the mean of means is taken, in one stage",
        "megatron/training/train_step.py",
        "            loss = as_weighted(loss)\n",
        "            loss = loss[0] / loss[1]\n",
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
        "tds/engine/engine.py",
        "    sum_tied(engine.module.get_tied_weights_and_groups(), gradients.of, engine.sums_dtype)\n",
        "    if not engine.zero_optimization():\n"
        "        sum_tied(engine.module.get_tied_weights_and_groups(), gradients.of, engine.sums_dtype)\n",
        ("tests/tds/engine/test_optimizers.py::test_zero_1_is_zero_0_to_the_bit_in_every_step",),
    ),
    Mutant(
        "an overflow on one stage is not told to the others, under ZeRO",
        "tds/engine/optimizers.py",
        '        self._name = "grad_accum" if',
        '        optimizer.model_parallel_group = None\n        self._name = "grad_accum" if',
        (OVERFLOW,),
    ),
    Mutant(
        "the norm counts tied weights twice, in fp16",
        "tds/engine/optimizers.py",
        '("ds_pipe_replicated", "model_parallel", "tensor_model_parallel")',
        "()",
        (OVERFLOW,),
    ),
    Mutant(
        "the loss is not scaled, but the gradients are unscaled",
        "tds/engine/optimizers.py",
        "        return 1.0 if scale is None else float(scale)\n",
        "        return 1.0\n",
        (OVERFLOW,),
    ),
    Mutant(
        "gradients of a batch that was stopped are added to the next one's",
        "tds/engine/engine.py",
        "    except BaseException:\n        forget(engine, gradients)\n        raise\n",
        "    except BaseException:\n        raise\n",
        ("tests/tds/engine/test_optimizers.py::test_a_batch_that_on_loss_stops_leaves_nothing_to_the_next",),
    ),
    Mutant(
        "after a step that raised the engine is at a boundary for ever",
        "tds/engine/engine.py",
        "    finally:\n        engine._force_grad_boundary = False\n",
        "    finally:\n        pass\n    engine._force_grad_boundary = False\n",
        ("tests/tds/engine/test_engine.py::test_a_step_that_raises_counts_for_nothing_and_adds_to_no_later_batch",),
    ),
    Mutant(
        "a step that raised leaves its gradients to the next batch",
        "tds/engine/engine.py",
        "    engine._has_untaken_gradients = True",
        "    engine._has_untaken_gradients = False",
        ("tests/tds/engine/test_engine.py::test_a_step_that_raises_counts_for_nothing_and_adds_to_no_later_batch",),
    ),
    Mutant(
        "evaluation moves the count of forwards that seeds layers",
        "tds/engine/evaluate.py",
        ", forwards_uncounted(module):",
        ":",
        ("tests/tds/engine/test_evaluation.py::test_evaluation_between_steps_changes_nothing_in_training",),
    ),
)

"""Mistakes in the optimizer and its learning rate."""

from __future__ import annotations

from tests.mutants.mutant import EXCHANGE, FP16, LOOP, PIPELINE, RECEIVES, Mutant

FURTHER, HOSTS = (
    f"tests/tds/p2p/test_receives.py::{name}"
    for name in (
        "test_a_receive_is_posted_for_the_next_action_and_further_ahead_only_in_a_ring",
        "test_on_a_host_it_is_posted_one_action_earlier",
    )
)
SPLITS = "tests/tds/p2p/test_channels.py::test_a_few_splits_of_the_world_make_the_groups_of_all_pipelines"

STEPS = (
    Mutant(
        "the learning rate advances on a skipped step",
        "megatron/training/trainer.py",
        "    progress.updates += 0 if result.is_skipped else 1\n",
        "    progress.updates += 1\n",
        (f"{LOOP}::test_a_skipped_step_counts_its_samples_but_holds_the_learning_rate",),
    ),
    Mutant(
        "an overflow is seen on its own rank only",
        "megatron/optim/optimizer.py",
        "        self.overflow = not math.isfinite(norm) and",
        "        self.overflow = not all(bool(g.isfinite().all()) for _, g in self.gradients()) and",
        (f"{FP16}::test_an_overflow_on_one_rank_is_seen_by_all",),
        refuses=True,  # the rank that fails first is lost by the others, one of which may be the first to say so
    ),
    Mutant(
        "a run has only the overflows of its own stage",
        "megatron/training/setup.py",
        "        model=world.grid.model,\n",
        "        model=world.grid.tensor,\n",
        (f"{FP16}::test_an_overflow_on_one_rank_is_seen_by_all",),
    ),
    Mutant(
        "backward takes the newest micro-batch instead of its own",
        "tds/engine/stage.py",
        "        state = self._in_flight.pop(_key(action))\n",
        "        state = self._in_flight.pop(max(self._in_flight))\n",
        (PIPELINE,),
    ),
    Mutant(
        "receives are posted one action too early on a device",
        "tds/p2p/communicator.py",
        "place : place + 1 + is_on_host",
        "place : place + 2",
        (RECEIVES,),
    ),
    Mutant(
        "receives are posted as early as they can be",
        "tds/schedule/limits.py",
        "        places = [max(each.earliest, each.taken - ahead) for each in travels]\n",
        "        places = [each.earliest for each in travels]\n",
        (FURTHER,),
    ),
    Mutant(
        "a receive is posted for the next action though its message depends on the one that runs",
        "tds/schedule/limits.py",
        "        places = [max(each.earliest, each.taken - ahead) for each in travels]\n"
        "        if _ends(travels, places, [len(actions) for actions in stages]):\n"
        "            break\n",
        "        places = [max(each.taken - ahead, 0) for each in travels]\n        break\n",
        (RECEIVES,),
    ),
    Mutant(
        "a send is taken for done when it is started",
        "tds/schedule/limits.py",
        "        needs[sender][sent + 1].append((receiver, place - 1))  # its receive\n",
        "",
        (FURTHER,),
    ),
    Mutant(
        "nothing is posted ahead",
        "tds/schedule/limits.py",
        "        places = [max(each.earliest, each.taken - ahead) for each in travels]\n",
        "        places = [each.taken for each in travels]\n",
        (FURTHER,),
    ),
    Mutant(
        "on a host receives are posted as on a device",
        "tds/p2p/communicator.py",
        "place : place + 1 + is_on_host",
        "place : place + 1",
        (HOSTS,),
    ),
    Mutant(
        "each pair of ranks is a split of its own",
        "tds/p2p/process_groups.py",
        "        if turn is None:\n",
        "        if True:\n",
        (SPLITS,),
    ),
    Mutant(
        "pairs that share a stage are made by one split",
        "tds/p2p/process_groups.py",
        " & set(route[1:]))\n",
        " & set(route[2:]))\n",
        (SPLITS,),
    ),
    Mutant(
        "groups of messages take NCCL's own number of processors",
        "tds/p2p/process_groups.py",
        "torch_api.nccl_options(max_ctas, timeout)",
        "torch_api.nccl_options(0, timeout)",
        (SPLITS,),
    ),
    Mutant(
        "DeepSpeed's grid has groups of its own",
        "megatron/training/setup.py",
        "    shared = groups_by_ranks(world.grid)\n",
        "    shared: dict = {}\n",
        ("tests/training/test_world.py::test_a_set_of_ranks_has_one_group_for_our_grid_and_deepspeeds",),
    ),
    Mutant(
        "a pipeline starts where each launch blocks",
        "tds/p2p/process_groups.py",
        """if num_stages > 1 and blocking not in ("", "0"):""",
        "if False:",
        ("tests/tds/p2p/test_channels.py::test_launches_that_block_are_refused_for_a_pipeline",),
    ),
    Mutant(
        "the form of an earlier call holds for an output of another shape",
        "tds/p2p/communicator.py",
        "        if crossing is None or crossing.fingerprint != fingerprint:\n",
        "        if crossing is None:\n",
        ("tests/tds/p2p/test_exchange.py::test_shapes_change_from_call_to_call_and_between_training_and_evaluation",),
        refuses=True,
    ),
    Mutant(
        "a known form is described in every call",
        "tds/p2p/communicator.py",
        "        if crossing is None or crossing.fingerprint != fingerprint:\n",
        "        if True:\n",
        ("tests/tds/p2p/test_exchange.py::test_an_output_of_a_known_form_is_not_described_again",),
    ),
    Mutant(
        "a new declaration is not held against outputs of a known form",
        "tds/p2p/communicator.py",
        "            self.agreed.clear()\n",
        "",
        ("tests/tds/p2p/test_exchange.py::test_a_new_declaration_holds_from_the_next_call_on",),
        refuses=True,
    ),
    Mutant(
        "a receive buffer is used again while its activations are in flight",
        "tds/p2p/communicator.py",
        "            buffer = layout.new_buffer(self.links.device)\n",
        "            kept = self.__dict__.setdefault('_kept', {})\n"
        "            buffer = kept.setdefault((kind, layout.num_bytes), layout.new_buffer(self.links.device))\n",
        (PIPELINE,),
    ),
    Mutant(
        "a mask of booleans arrives in 16 bits",
        "tds/p2p/packed_layout.py",
        "            tensors.append(piece.view(spec.dtype).view(spec.shape).data)\n",
        "            got = piece.view(spec.dtype).view(spec.shape).data\n"
        "            tensors.append(got.half() if spec.dtype is torch.bool else got)\n",
        ("tests/tds/p2p/test_wire.py::test_header_and_message_come_back_as_they_were", PIPELINE),
        refuses=True,  # a layer's own assertion, of which the other ranks hear
    ),
    Mutant(
        "the gradient of a second tensor is lost between stages",
        "tds/engine/stage.py",
        "t.grad for t in state.leaves]\n",
        "t.grad * (t is state.leaves[0]) for t in state.leaves]\n",
        (PIPELINE,),
    ),
    Mutant(
        "two tensors of a message change places",
        "tds/p2p/packed_layout.py",
        "        return tensors\n",
        "        same = len(tensors) > 1 and tensors[0].shape == tensors[-1].shape\n"
        "        return tensors[::-1] if same and tensors[0].dtype is tensors[-1].dtype else tensors\n",
        (EXCHANGE, PIPELINE),
        refuses=True,  # a layer's own assertion, of which the other ranks hear
    ),
    Mutant(
        "the elements that do not divide over the tensor group stay behind",
        "tds/p2p/packed_layout.py",
        "                numel = -(-numel // cut.size)\n",
        "                numel = numel // cut.size\n",
        ("tests/tds/p2p/test_wire.py::test_header_and_message_come_back_as_they_were",),
        refuses=True,
    ),
    Mutant(
        "a dict crosses a stage in the order of its names",
        "tds/p2p/boundary.py",
        "        return dict(zip(self.keys, tensors, strict=True))\n",
        "        return dict(zip(sorted(self.keys), tensors, strict=True))\n",
        (EXCHANGE,),
    ),
    Mutant(
        "a rank that is asked to stop stops alone",
        "megatron/training/initialize.py",
        "all_reduce(votes, group, dist.ReduceOp.MAX).tolist()",
        "votes.tolist()",
        (f"{LOOP}::test_all_ranks_stop_together_or_none",),
    ),
)

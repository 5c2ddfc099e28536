"""Mistakes in ZeRO 1: what replicas hold, what they gather, and what they write."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CUTS = "tests/optim/zero/test_cuts.py"
ZERO = "tests/optim/zero/test_zero.py"
SAVED = "tests/optim/zero/test_zero_checkpoints.py::test_a_checkpoint_goes_through_stages_and_layouts_with_every_bit[dtype0]"  # noqa: E501
COLUMNS = f"{ZERO}::test_many_steps_leave_the_bits_of_stage_0_in_every_precision[2-4]"
STEPS = f"{ZERO}::test_many_steps_leave_the_bits_of_stage_0_in_every_precision[1-3]"

ZERO_1 = (
    Mutant(
        "parts begin within a vector",
        "megatron/optim/zero/partition.py",
        "    step = VECTOR // math.gcd(VECTOR, parameter.numel() // size)\n",
        "    step = 1\n",
        (STEPS,),
    ),
    Mutant(
        "parts of a weight of odd columns are cut apart",
        "megatron/optim/zero/partition.py",
        "    if dim > 0 and size % step:",
        "    if dim > 2 and size % step:",
        (f"{CUTS}::test_columns_that_make_no_whole_vectors_stay_with_one_replica",),
    ),
    Mutant(
        "padding has a place in the global tensor",
        "megatron/optim/zero/partition.py",
        "(min(bound, real) for bound in",
        "(bound for bound in",
        (f"{CUTS}::test_the_places_of_the_parts_tile_what_is_real_of_the_rank",),
    ),
    Mutant(
        "parts of all tensor ranks lie where those of the first do",
        "megatron/optim/zero/partition.py",
        "            first, real = whole.start, whole.length\n",
        "            first, real = 0, whole.length\n",
        (SAVED,),
        refuses=True,
    ),
    Mutant(
        "replicas send the weights of before the update",
        "megatron/optim/zero/partition.py",
        "place.copy_(piece.master, non_blocking=True)",
        "place.copy_(piece.cut.part(piece.parameter, group.rank).clone())",
        (STEPS,),
    ),
    Mutant(
        "a replica's own part stays as it was in 16 bits",
        "megatron/optim/zero/partition.py",
        "            parts.copy_(sent)\n",
        "            theirs = torch.arange(len(parts)) != torch.distributed.get_rank() - piece.cut.runs[0][0]\n"
        "            parts[theirs] = sent[theirs]\n",
        (STEPS,),
    ),
    Mutant(
        "a cut across rows is updated as if it lay in one run",
        "megatron/optim/optimizer.py",
        "        with self._masters.contiguous() if self._masters.are_apart else nullcontext():\n",
        "        if True:\n",
        (COLUMNS,),
    ),
    Mutant(
        "a cut across rows is updated in a copy",
        "megatron/optim/main_params.py",
        "                view.copy_(master.data)\n",
        "",
        (COLUMNS,),
    ),
    Mutant(
        "the norm is that of a replica's part",
        "megatron/optim/optimizer.py",
        "        return [(p, self._gradients.of(p)) for p in self._counted]\n",
        "        return [(p, self._masters.part(p, self._gradients.of(p))) for p in self._counted]\n",
        (STEPS,),
    ),
    Mutant(
        "parts are not clipped",
        "megatron/optim/optimizer.py",
        "            torch._foreach_mul_(gradients, factor)\n",
        "            [x.mul_(factor) for p, x in zip(self._masters.of, gradients) if x.numel() == p.numel()]\n",
        (STEPS,),
    ),
    Mutant(
        "the first replica alone writes",
        "megatron/optim/optimizer.py",
        "self._masters.group_of(parameter).rank == 0 or self._masters.is_cut(parameter)",
        "self._masters.group_of(parameter).rank == 0",
        (SAVED,),
        refuses=True,
    ),
    Mutant(
        "what is loaded is not gathered",
        "megatron/optim/main_params.py",
        "        if not pieces:\n",
        "        if any(m.grad is None for m in self.of.values()):\n",
        (SAVED,),
    ),
    Mutant(
        "every replica has all masters",
        "megatron/optim/main_params.py",
        "        self._is_cut = zero_stage > 0 and (data.size > 1 or offload.parameters)\n",
        "        self._is_cut = False\n",
        (f"{ZERO}::test_a_replica_holds_its_share_of_the_bytes",),
    ),
    Mutant(
        "the part of a master in 32 bits is a copy",
        "megatron/optim/main_params.py",
        "        elif not is_wide:\n            part = part.float()",
        "        elif True:\n            part = part.float()",
        (f"{ZERO}::test_a_replica_holds_its_share_of_the_bytes",),
    ),
    Mutant(
        "the plan counts the states whole",
        "megatron/training/estimates.py",
        "        zero=zero_of(config, topology.data_context),\n",
        "        zero=zero_of(config, 1),\n",
        ("tests/training/test_plan.py::test_a_plan_with_zero_1_counts_the_states_that_replicas_share",),
    ),
)

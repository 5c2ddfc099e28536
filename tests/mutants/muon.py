"""Mistakes in Muon: matrices that are not whole, that have no owner or two, that are cut or scaled otherwise."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ONE = "tests/optim/test_muon.py"
BITS = f"{ONE}::test_twenty_steps_are_those_of_torchs_muon_to_the_bit"
KINDS = f"{ONE}::test_matrices_of_layers_go_by_muon_and_all_else_by_adamw"
LAYOUTS = "tests/optim/test_muon_layouts.py"
WHOLE = f"{LAYOUTS}::test_every_layout_trains_the_weights_of_one_process[2-1-2-1-1]"
OWNER = f"{LAYOUTS}::test_each_matrix_has_one_owner[2-2-1]"
RESUMED = f"{LAYOUTS}::test_a_resumed_run_is_bit_for_bit_the_one_that_did_not_stop"

MUON = (
    Mutant(
        "each rank makes its own part of a matrix orthogonal",
        "megatron/optim/muon.py",
        "moved = self._orthogonalised(weights, [self._owners[number] for number in run], updates)",
        "moved = [newton_schulz(update) for update in updates]",
        (WHOLE,),
    ),
    Mutant(
        "the momentum is not saved",
        "megatron/training/train_state.py",
        'if isinstance(value, torch.Tensor) and key != "step":',
        'if isinstance(value, torch.Tensor) and key not in ("step", "momentum_buffer"):',
        (RESUMED,),
    ),
    Mutant(
        "every rank of a tensor group is the owner of a matrix",
        "megatron/optim/muon.py",
        "owned_by[index][1]) for index in here]",
        "self._tensor.rank) for index in here]",
        (OWNER,),
        refuses=True,
    ),
    Mutant(
        "one rank is the owner of all matrices",
        "megatron/optim/muon.py",
        "found += [divmod(o, self._tensor.size) for o in owners(costs, self._data.size * self._tensor.size)]",
        "found += [(0, 0) for _ in costs]",
        (OWNER,),
    ),
    Mutant(
        "query, key and value are one matrix",
        "megatron/mpu/matrices.py",
        "return self if qkv else Matrices()",
        "return Matrices()",
        (BITS,),
    ),
    Mutant(
        "gate and up are one matrix",
        "megatron/models/common/transformer.py",
        "set_matrices(self.up.weight, (1, 1))",
        "set_matrices(self.up.weight)",
        (BITS,),
    ),
    Mutant(
        "keys and values change places with queries",
        "megatron/models/common/attention.py",
        "set_matrices(self.query_key_value.weight, (heads // groups * d, d, d), head=d)",
        "set_matrices(self.query_key_value.weight, (d, d, heads // groups * d), head=d)",
        (BITS,),
    ),
    Mutant(
        "Muon moves the table of tokens",
        "megatron/mpu/layers.py",
        "        self.weight = empty_weight((rows, hidden_size), shard)\n",
        "        self.weight = set_matrices(empty_weight((rows, hidden_size), shard))\n",
        (KINDS,),
    ),
    Mutant(
        "Muon moves the head",
        "megatron/models/common/language_model.py",
        "        self.weight = empty_weight((rows, sizes.hidden_size), shard)\n",
        "        self.weight = empty_weight((rows, sizes.hidden_size), shard)\n"
        "        __import__('megatron.mpu.matrices', fromlist=['x']).set_matrices(self.weight)\n",
        (KINDS,),
    ),
    Mutant(
        "the scale of an update is that of a rank's part",
        "megatron/optim/muon.py",
        "scales = [self._args.scale(*shape) for shape in weight.matrices.shapes(weight.cut.shape)]",
        "scales = [self._args.scale(*master.shape)]",
        (WHOLE,),
    ),
    Mutant(
        "parts of a matrix are joined in another order",
        "megatron/optim/matrix_owners.py",
        "place = whole if cut is None else cut.part(whole, rank)\n                place.copy_",
        "place = whole if cut is None else cut.part(whole, group.size - 1 - rank)\n                place.copy_",
        (WHOLE,),
        refuses=True,
    ),
    Mutant(
        "Newton-Schulz has other coefficients",
        "megatron/torch_compat.py",
        "coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)",
        "coefficients = (3.4445, -4.7750, 2.0)",
        ("tests/test_torch_compat.py::test_the_private_newton_schulz_is_what_torchs_muon_moves_a_matrix_by",),
    ),
)

"""Each function of ``megatron.mpu.mappings`` type-checks, and inputs of a wrong type are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.mpu import mappings
from tests.helpers.harness import RankFailure, run_ranks
from tests.types.optional import DEADLINE_S, NEEDS_SPMD_TYPES

pytestmark = NEEDS_SPMD_TYPES

FUNCTIONS = {
    "copy_to_tensor_region": ("I", "R"),
    "reduce_from_tensor_region": ("P", "I"),
    "scatter_to_tensor_region": ("I", "V"),
    "gather_from_tensor_region": ("V", "I"),
    "gather_from_sequence_region": ("V", "R"),
    "reduce_scatter_to_sequence_region": ("P", "V"),
    "scatter_to_sequence_region": ("I", "V"),
}
"""Function -> types of its input and output on the tensor axis."""
REJECTED = [
    *((name, local_type) for name, (allowed, _) in FUNCTIONS.items() for local_type in "RIVP" if local_type != allowed),
]


def call_function(rank: int, name: str, local_type: str) -> str:
    """Call a function with an input of ``local_type`` on the tensor axis; return the type of the output there."""
    import spmd_types as spmd
    import torch

    from megatron.mpu.topology import Topology
    from tests.types import typed_functions
    from tests.types.check import type_session
    from tests.types.fake_world import fake_grid
    from tests.types.local_types import Mesh

    typed_functions.install()
    typed_functions.is_active = True
    topology = Topology(pipe=1, data=2, tensor=2)
    with fake_grid(topology, 0) as grid, type_session(Mesh(topology)) as mesh:
        with spmd.no_typecheck():
            x = torch.ones(4, 4, requires_grad=True) * 1.0
        spmd.assert_type(x, mesh.types(spmd.PerMeshAxisLocalSpmdType[local_type], spmd.V))
        y = getattr(mappings, name)(x, grid.tensor)
        return str(spmd.get_axis_local_type(y, mesh.tensor).value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_types_of_table(name: str) -> None:
    input_type, output_type = FUNCTIONS[name]
    assert run_ranks(1, call_function, name, input_type, init=False, deadline_s=DEADLINE_S) == [output_type]


def is_sum_of_products(name: str, local_type: str) -> bool:
    """Return True for a V where a P is allowed: local types do not distinguish a shard from a summand."""
    return FUNCTIONS[name][0] == "P" and local_type == "V"


def call_with_all_types(rank: int) -> dict[tuple[str, str], str]:
    """Return the error of each call in ``REJECTED``."""
    import spmd_types as spmd

    errors: dict[tuple[str, str], Any] = {}
    for case in REJECTED:
        try:
            errors[case] = call_function(rank, *case)
        except spmd.SpmdTypeError as error:
            errors[case] = str(error)
    return errors


def test_inputs_of_other_types_are_rejected() -> None:
    (errors,) = run_ranks(1, call_with_all_types, init=False, deadline_s=DEADLINE_S)
    for (name, local_type), error in errors.items():
        if is_sum_of_products(name, local_type):
            assert error == FUNCTIONS[name][1]
        else:
            assert f"must be {FUNCTIONS[name][0]}" in error and f"but is {local_type}" in error, (name, local_type)


def reduce_over_wrong_group(rank: int) -> None:
    """Sum a partial sum of the tensor ranks over the data ranks."""
    import spmd_types as spmd
    import torch

    from megatron.mpu.topology import Topology
    from tests.types.check import type_session
    from tests.types.fake_world import fake_grid
    from tests.types.local_types import Mesh

    topology = Topology(pipe=1, data=2, tensor=2)
    with fake_grid(topology, 0) as grid, type_session(Mesh(topology)) as mesh:
        with spmd.no_typecheck():
            x = torch.ones(4)
        mappings.all_reduce(spmd.assert_type(x, mesh.types(spmd.P, spmd.R)), grid.data)


def test_sum_over_another_group_is_rejected() -> None:
    with pytest.raises(RankFailure, match="input of all_reduce must be P or V on axis data x context 0, but is R"):
        run_ranks(1, reduce_over_wrong_group, init=False, deadline_s=DEADLINE_S)

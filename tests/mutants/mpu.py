"""Mutants of tensor-parallel layers and their collectives."""

from __future__ import annotations

from typing import Any

from tests.mutants.mutant import mutant

LINEAR = "tests/mpu/test_layers.py::test_column_then_row_equals_two_linears"
EMBEDDING = "tests/mpu/test_vocabulary.py::test_embedding_equals_torch_and_padded_rows_get_no_gradient"
ENTROPY = "tests/mpu/test_vocabulary.py::test_cross_entropy_equals_torch_and_padded_columns_get_no_probability"


@mutant("megatron.mpu.mappings:_Reduce.forward", LINEAR)
def row_parallel_output_is_not_summed(original: Any) -> Any:
    return lambda ctx, x, group: x.clone()


@mutant("megatron.mpu.mappings:_Reduce.backward", LINEAR)
def row_parallel_gradient_is_doubled(original: Any) -> Any:
    return lambda ctx, *grads: (2 * grads[0], None)

"""What a planted mistake is, and the tests that several of them are planted for."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """In ``file``, ``old`` (there exactly once) becomes ``new``; one of ``tests`` must then fail.

    It must fail by a comparison, or where the code itself ``refuses`` to go on with the mistake by an exception.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    refuses: bool = False


PIPELINE = "tests/tds/test_parity.py::test_fp32_equals_one_process_to_the_bit[2]"
EXCHANGE = "tests/tds/p2p/test_exchange.py::test_every_structure_crosses_in_both_directions_with_any_number_of_chunks"
RECEIVES = "tests/tds/p2p/test_receives.py::test_no_receive_is_posted_that_depends_on_what_the_stage_runs"
TIED = "tests/tds/test_parity.py::test_fp64_tied_weights_equal_one_process[2]"
NORM = "tests/tds/test_grads.py::test_replicated_cut_and_tied_parameters_count_once"
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
OVERFLOW = (
    "tests/tds/engine/test_optimizers.py::test_an_overflow_on_one_stage_skips_the_same_step_on_all_with_one_scale"
)

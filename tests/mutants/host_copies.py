"""Mistakes in groups that send through the host, in who shares a device, and in the GPU program's part `layouts`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SEAM = "tds/p2p/host_copies.py"
COPIES = "tests/tds/p2p/test_host_copies.py"
SHARED = "tests/training/test_world.py::test_over_gloo_ranks_share_the_devices_of_their_host_and_send_through_it"
PART = "benchmarks/gpu/checks.py"
LAYOUTS = "tests/benchmarks/gpu/test_layouts.py"

HOST_COPIES = (
    Mutant(
        "what comes in through the host stays in the copy",
        SEAM,
        "            tensor.data.copy_(copy)",
        "            copy.copy_(copy)",
        (f"{COPIES}::test_every_operation_gives_what_gloo_gives",),
    ),
    Mutant(
        "only what is changed in place goes out through the host",
        SEAM,
        "    if role != OUT:\n",
        "    if role == BOTH:\n",
        (f"{COPIES}::test_every_operation_gives_what_gloo_gives",),
    ),
    Mutant(
        "a copy that comes in counts as a change in place, which a backward may refuse",
        SEAM,
        "            tensor.data.copy_(copy)",
        "            tensor.copy_(copy)",
        (f"{COPIES}::test_a_sum_on_its_way_leaves_the_tensor_alone_and_counts_no_change_in_place",),
    ),
    Mutant(
        "every rank says that the host is no way for speed",
        SEAM,
        "if not _has_announced and dist.get_rank() == 0:",
        "if not _has_announced:",
        (f"{COPIES}::test_it_says_once_in_a_job_that_it_is_not_for_speed",),
    ),
    Mutant(
        "a pipeline on GPUs is refused even where its groups go through the host",
        "tds/p2p/process_groups.py",
        " and not isinstance(own, host_copies.HostCopies):",
        ":",
        (f"{COPIES}::test_stages_on_gpus_send_in_a_group_that_copies_and_are_told_of_it_where_gloo_is_alone",),
    ),
    Mutant(
        "DeepSpeed takes a device that the host does not have",
        "megatron/training/initialize.py",
        'os.environ["LOCAL_RANK"] = str(local_rank % number)',
        'os.environ["LOCAL_RANK"] = str(local_rank)',
        (SHARED,),
    ),
    Mutant(
        "every backend of a device goes through the host",
        "megatron/training/initialize.py",
        'asked == "gloo" and kind != "cpu"',
        'kind != "cpu"',
        (SHARED,),
    ),
    Mutant(
        "ranks over gloo may not share a GPU",
        "megatron/training/initialize.py",
        'dist.get_backend() != "nccl"',
        'dist.get_backend() == "gloo"',
        ("tests/training/test_sameness.py::test_two_ranks_on_one_gpu_are_named_with_what_made_them_choose_it",),
    ),
    Mutant(
        "a layout that differs from one process passes",
        PART,
        '    assert told["is_equal"], ',
        "    assert told, ",
        (f"{LAYOUTS}::test_a_layout_that_differs_fails",),
    ),
    Mutant(
        "two replicas take twice the global batch",
        PART,
        "MICRO_BATCHES // (2 if DATA in layout else 1)",
        "MICRO_BATCHES",
        (f"{LAYOUTS}::test_one_process_is_started_once_for_a_model_and_a_format",),
    ),
)

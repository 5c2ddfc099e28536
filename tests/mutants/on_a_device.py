"""Mistakes on the way that a device takes and a CPU does not, and in what tells of tests on a GPU."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SIMULATED = ("tests/gpu/test_dry_form.py::test_some_of_them_pass_on_the_simulated_device",)
PART = "tests/benchmarks/gpu/test_suite.py"

ON_A_DEVICE = (
    Mutant(
        "root mean squares of a device have twice the epsilon",
        "megatron/models/common/norms.py",
        "    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)\n",
        "    return F.rms_norm(x, (x.shape[-1],), weight, 2 * epsilon)\n",
        SIMULATED,
    ),
    Mutant(
        "masks go to cuDNN",
        "megatron/ops/attention.py",
        "    return nullcontext() if mask is None else sdpa_kernel(FOR_MASKS)\n",
        "    return nullcontext()\n",
        SIMULATED,
    ),
    Mutant(
        "scores of T5 are scaled on a device",
        "megatron/ops/biased_attention.py",
        "    return attention(query, key, value, mask=added, is_causal=False, dropout=dropout, scale=1.0)\n",
        "    return attention(query, key, value, mask=added, is_causal=False, dropout=dropout)\n",
        SIMULATED,
    ),
    Mutant(
        "a device takes a label outside the vocabulary",
        "megatron/mpu/cross_entropy.py",
        '        return weights.masked_fill(wrong, float("nan"))\n',
        "        return weights\n",
        SIMULATED,
    ),
    Mutant(
        "the table of rotary positions stays on the host",
        "megatron/ops/positions.py",
        "        return cosine.to(device, dtype), sine.to(device, dtype)\n",
        "        return cosine.to(dtype), sine.to(dtype)\n",
        SIMULATED,
    ),
    Mutant(
        "what shall wait on the host waits on the device",
        "megatron/mpu/activation_storage.py",
        "        if self.how.is_on_host:\n            return device.host_memory(shape, like.dtype, like.device)\n",
        "",
        SIMULATED,
    ),
    Mutant(
        "masks of any layout are made on the host",
        "megatron/mpu/random.py",
        "-(-columns.stop // LANES), device=rows.device)\n",
        "-(-columns.stop // LANES))\n",
        SIMULATED,
    ),
    Mutant(
        "tests that could not be set up have passed",
        "benchmarks/gpu/checks.py",
        'child.tag in ("failure", "error")]\n',
        'child.tag == "failure"]\n',
        (f"{PART}::test_failed_tests_are_told_by_name_with_why",),
    ),
    Mutant(
        "a file of which every test is skipped is a success",
        "benchmarks/gpu/checks.py",
        "    if not report.passed:\n        raise Skip(report.text)\n",
        "",
        (f"{PART}::test_a_file_of_which_nothing_ran_is_no_success",),
    ),
    Mutant(
        "a file without a test is a success",
        "benchmarks/gpu/checks.py",
        "    if done.code:  # interrupted, broken, wrongly called, no such test\n",
        "    if done.code > 5:\n",
        (f"{PART}::test_a_file_of_which_nothing_ran_is_no_success",),
    ),
)

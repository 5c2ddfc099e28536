"""Mistakes by which the host waits for the device, or by which what it reads at once is of another moment."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

READS = "tests/training/test_host_reads.py"
ONE_STAGE = f"{READS}::test_one_stage_waits_once_in_a_step[one rank]"
PIPELINE = f"{READS}::test_a_stage_of_a_pipeline_waits_once_in_a_step_and_reads_no_header_again"
NORM = "tests/optim/test_mixed_precision.py::test_a_norm_that_was_asked_for_ahead_is_of_the_gradients_that_lie_there"

HOST_READS = (
    Mutant(
        "DeepSpeed times its throughput, for which it waits for the device",
        "megatron/arguments/deepspeed_json.py",
        """    engine["timers"] = {"throughput": off, **engine.get("timers", {})}""",
        "    pass",
        (ONE_STAGE,),
    ),
    Mutant(
        "loss and norm are read one after the other",
        "tds/loss.py",
        "    (optimizer.raw_norm,) = agreement.read(optimizer.norm_of_sums())\n",
        "    optimizer.raw_norm = optimizer.norm_of_sums().item()\n",
        (ONE_STAGE,),
    ),
    Mutant(
        "the optimizer takes its own norm once more",
        "megatron/optim/optimizer.py",
        "self.norm_of_sums().item() if self.raw_norm is None else self.raw_norm",
        "self.norm_of_sums().item()",
        (ONE_STAGE,),
    ),
    Mutant(
        "means are copied to the device",
        "tds/loss.py",
        "        return torch.full((), self.numbers[name], dtype=dtype, device=self.device)",
        "        return torch.tensor(self.numbers[name], dtype=dtype, device=self.device)",
        (PIPELINE,),
    ),
    Mutant(
        "a pipeline's loss is asked of the device",
        "megatron/training/train_step.py",
        "            self.engine.train_batch(data)\n        result = ",
        "            float(self.engine.train_batch(data))\n        result = ",
        (PIPELINE,),
    ),
    Mutant(
        "a header that is known is read again",
        "tds/p2p/communicator.py",
        "        if crossing is None or not torch.equal(crossing.header, header):\n",
        "        if True:\n",
        (PIPELINE,),
    ),
    Mutant(
        "a norm outlives its gradients",
        "megatron/optim/optimizer.py",
        "        self.raw_norm = None\n        self._gradients.clear()\n",
        "        self._gradients.clear()\n",
        (NORM,),
    ),
    Mutant(
        "hosts agree over the device",
        "megatron/training/initialize.py",
        "(self.grid.world if self.device == on_host else self.grid.host), on_host",
        "self.grid.world, on_host",
        ("tests/training/test_world.py::test_hosts_agree_over_the_host_where_a_device_would_have_to_be_waited_for",),
    ),
)

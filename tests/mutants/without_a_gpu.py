"""Mistakes on streams and devices that the tests on a device without CUDA must see."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ORDER = "tests/cuda/test_order.py"
BESIDE = f"{ORDER}::test_what_runs_beside_the_computation_is_waited_for"
UPLOADS = f"{BESIDE}[uploads]"
ON_THE_HOST = f"{BESIDE}[activations on the host]"
SUMS = f"{BESIDE}[sums beside the backward]"
SEQUENCE = f"{BESIDE}[sequence parallel]"
STAGES = f"{BESIDE}[stages]"

WITHOUT_A_GPU = (
    Mutant(
        "the device does not wait for an upload",
        "megatron/device.py",
        "    current.wait_event(uploaded)\n",
        "",
        (UPLOADS,),
    ),
    Mutant(
        "the memory of an upload may be taken while it is read",
        "megatron/device.py",
        "        copy.record_stream(current)  # its memory is not given to the next upload before the computation has "
        "read it\n",
        "        pass\n",
        (UPLOADS,),
    ),
    Mutant(
        "an activation is copied to the host before it is there",
        "megatron/device.py",
        "    beside.wait_stream(torch.accelerator.current_stream(source.device))\n",
        "",
        (ON_THE_HOST,),
    ),
    Mutant(
        "the memory of an activation may be taken while it is copied",
        "megatron/device.py",
        "    source.record_stream(beside)  # its memory is not given to another before the copy has read it\n",
        "",
        (ON_THE_HOST,),
    ),
    Mutant(
        "an activation is used before it has come back",
        "megatron/device.py",
        "    current.wait_stream(beside)\n",
        "",
        (ON_THE_HOST,),
    ),
    Mutant(
        "gradients are summed on a stream that does not wait for them",
        "tds/gradients.py",
        "        return cls(gradients, flat, dist.all_reduce(flat, group=group, async_op=True))\n",
        "        with torch.Stream(flat.device):\n"
        "            return cls(gradients, flat, dist.all_reduce(flat, group=group, async_op=True))\n",
        (SUMS,),
    ),
    Mutant(
        "nobody waits for what tensor ranks gather",
        "megatron/mpu/mappings.py",
        "        self.work.wait()\n        return self.tensor\n",
        "        return self.tensor\n",
        (SEQUENCE,),
    ),
    Mutant(
        "micro-batches are cast on the host and held up there",
        "megatron/device.py",
        "        copies = {name: tensor.to(place, non_blocking=True) for name, tensor in tensors.items()}\n",
        "        copies = {name: tensor.to(place) for name, tensor in tensors.items()}\n",
        (UPLOADS,),
    ),
    Mutant(
        "the numbers of losses stay on the host",
        "tds/loss.py",
        "    known, named = (upload(numbers, device) for numbers in made)\n",
        "    known, named = made\n",
        (UPLOADS,),
        refuses=True,
    ),
    Mutant(
        "a stage sends its gradients before it receives what the next stage waits with",
        "tds/p2p/communicator.py",
        "    def send_backward(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:\n"
        '        """Send the gradients of the leaves that ``recv_forward`` returned, in their order."""\n'
        "        layout = self.incoming[self._key(message)].gradients\n"
        "        if message.peer == self.links.stage:\n"
        "            self._own[Kind.GRADIENT, message.micro_batch, message.chunk - 1] = list(gradients)\n"
        "        elif layout.specs:\n"
        "            self.send(Kind.GRADIENT, message, layout.pack(gradients))\n",
        "    def send_backward(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:\n"
        '        """Send the gradients of the leaves that ``recv_forward`` returned, in their order."""\n'
        "        layout = self.incoming[self._key(message)].gradients\n"
        "        if layout.specs:\n"
        "            self.send(Kind.GRADIENT, message, layout.pack(gradients))\n"
        "            self.finish()\n",
        ("tests/cuda/test_rendezvous.py::test_messages_meet_in_every_schedule",),
    ),
    Mutant(
        "the memory of a message may be taken while the stage reads it",
        "tds/p2p/communicator.py",
        "            keep_for_current_stream(transfer.buffer)\n",
        "            pass\n",
        (STAGES,),
    ),
    Mutant(
        "a receive waits for the action that runs",
        "tds/p2p/communicator.py",
        "        with self.beside or nullcontext():\n",
        "        with nullcontext():\n",
        (STAGES,),
    ),
    Mutant(
        "nobody waits for a message on a device",
        "tds/p2p/communicator.py",
        "            else:\n                transfer.work.wait()\n",
        "            elif transfer.kind is Kind.HEADER:\n                transfer.work.wait()\n",
        (STAGES,),
    ),
    Mutant(
        "the header is read where the message is taken, and the message is posted there",
        "tds/p2p/communicator.py",
        "            if self._posted[Kind.HEADER, message.peer] and not is_host(self.links.device):\n",
        "            if False:\n",
        ("tests/cuda/test_rendezvous.py::test_messages_meet_in_every_schedule",),
    ),
)

"""Hook that dumps one training step of any PyTorch trainer for tools/referee.py. Paste it; it imports only torch.

    referee("dumps/tp2", model, order=True)                               # optional: before forward
    referee("dumps/tp2", model, loss, tp=(tp_rank, 2), dp=(dp_rank, 1))   # after backward, before clipping
    referee("dumps/tp2", norm=grad_norm)                                  # after clipping

``model`` is a module or a list of model chunks. Each keyword argument names an axis of the layout and gives this rank's
index on it and its size; ``micro=(0, N)`` gives the number of micro-batches. docs/referee.md describes the format.
"""

import os

import torch
import torch.distributed as dist

CALLS = {}  # name of each module, in the order of the forward pass


def referee(folder, model=None, loss=None, norm=None, order=False, **axes):
    """Dump parameters, gradients and loss of this rank; with ``norm``, the gradient norm that the trainer computed."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"rank-{rank:05d}")
    if model is None:
        torch.save({"norm": float(norm)}, path + ".norm.pt")
        return
    tensors = {}
    for chunk_idx, chunk in enumerate(model if isinstance(model, (list, tuple)) else [model]):
        if order:
            for name, module in chunk.named_modules():
                module.register_forward_pre_hook(lambda *_, name=f"chunk{chunk_idx}.{name}": CALLS.setdefault(name))
            continue
        for name, param in chunk.named_parameters():
            grad = getattr(param, "main_grad", None) if param.grad is None else param.grad
            entry = tensors[f"chunk{chunk_idx}.{name}"] = {"dim": getattr(param, "partition_dim", None)}
            for key, tensor in (("value", param), ("grad", grad)):
                if hasattr(tensor, "to_local"):  # DTensor
                    entry[f"{key}_placements"] = [repr(placement) for placement in tensor.placements]
                    entry["mesh"], entry["shape"] = tensor.device_mesh.mesh.tolist(), list(tensor.shape)
                    tensor = tensor.to_local()
                entry[key] = None if tensor is None else tensor.detach().cpu().clone()
    if not order:
        content = {"rank": rank, "world_size": world_size, "axes": axes, "tensors": tensors, "calls": list(CALLS)}
        torch.save({**content, "loss": None if loss is None else float(torch.as_tensor(loss).detach())}, path + ".pt")

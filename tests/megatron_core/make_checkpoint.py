"""Write the checkpoint of megatron-core with which tests/checkpoint/torch_dist/ works: CHECKPOINT, an archive.

    MEGATRON_CORE=FOLDER python -m tests.megatron_core.make_checkpoint

The archive contains the folder of Megatron-LM after step 2 of a small Mixtral with expert parallelism on two ranks, and
``losses.json`` with the losses, learning rates and gradient norms that megatron-core computed in steps 1 to 5.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

import numpy as np

from megatron.data.mock_dataset import MockTokens
from tests.helpers.megatron_core import run_megatron_core

CHECKPOINT = Path(__file__).resolve().parents[1] / "checkpoint" / "torch_dist" / "mixtral.tar.xz"
VOCAB_SIZE, SEQ_LENGTH, BATCH, SEED = 8, 6, 2, 1234
SAVED, LAST = 2, 5
ARGS = {
    "num_layers": 2, "hidden_size": 4, "num_attention_heads": 4, "kv_channels": 2, "group_query_attention": True,
    "num_query_groups": 2, "ffn_hidden_size": 4, "max_position_embeddings": 8, "padded_vocab_size": VOCAB_SIZE,
    "seq_length": SEQ_LENGTH, "global_batch_size": BATCH, "micro_batch_size": BATCH, "train_iters": 8, "swiglu": True,
    "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 2,
    "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None, "moe_router_load_balancing_type": "none",
    "expert_model_parallel_size": 2,
}  # fmt: skip


def main() -> None:
    """Train with megatron-core and write the archive."""
    with tempfile.TemporaryDirectory() as name:
        folder, samples = Path(name), MockTokens(VOCAB_SIZE, SEQ_LENGTH, SEED)
        np.save(folder / "tokens.npy", np.stack([samples[idx] for idx in range(LAST * BATCH)]))
        job = {"name": "losses", "args": ARGS, "last": LAST, "save": "megatron", "save_at": SAVED}
        run_megatron_core("tests.megatron_core.checkpoint_program", folder, num_ranks=2, deadline_s=300, jobs=[job])
        with tarfile.open(CHECKPOINT, "w:xz") as archive:
            for member in ("megatron", "losses.json"):
                archive.add(folder / member, member, filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()

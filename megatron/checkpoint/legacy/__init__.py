"""Import checkpoints from Megatron-LM, CPM-Pretrain and CPM-1, without executing code in their files."""

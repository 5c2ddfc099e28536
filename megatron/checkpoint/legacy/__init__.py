"""Import of checkpoints of Megatron-LM, CPM-Pretrain and CPM-1, without executing code in their files."""

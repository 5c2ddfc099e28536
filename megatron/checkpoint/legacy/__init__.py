"""Checkpoints of Megatron-LM, CPM-Pretrain and CPM-1, read without running what they carry."""

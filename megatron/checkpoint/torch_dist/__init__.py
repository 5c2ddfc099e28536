"""Megatron-Core checkpoints in its format ``torch_dist``: read by --load, written by tools/export_megatron.py."""

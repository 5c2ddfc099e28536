"""Conversion between our checkpoints and Hugging Face folders; ``transformers`` is imported only for --verify."""

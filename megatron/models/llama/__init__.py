"""The LLaMA family: its entry in the registry (config.py) and its Hugging Face formats."""

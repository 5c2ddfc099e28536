"""The GPT-2 family: its entry in the registry (config.py) and its Hugging Face format."""

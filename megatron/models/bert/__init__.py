"""The BERT family: its entry in the registry (config.py), model, pipeline, data, costs and Hugging Face format."""

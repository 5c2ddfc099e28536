"""The model's layers laid out as pipeline stages: the only place that joins ``megatron.model`` and ``tds``."""

"""Maps between our logical names and Hugging Face's; no import of ``transformers``."""

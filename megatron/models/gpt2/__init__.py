"""GPT-2: its section, checks and line (config.py), and the parts that are its own."""

"""What it costs: programs that measure speed and memory, and what they compare with."""

"""The parts, the most telling first."""

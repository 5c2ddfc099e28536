"""ZeRO 1 to 3 and offload."""

"""Watchdog: detects hanging ranks and identifies the cause."""

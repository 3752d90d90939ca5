"""Campaigns whose figures are in RELIABILITY.md: ``python -m tests.soak CAMPAIGN``."""

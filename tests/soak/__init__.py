"""Campaigns of many runs, each with its figures: ``python -m tests.soak CAMPAIGN``."""

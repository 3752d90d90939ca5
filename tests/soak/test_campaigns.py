"""The beginning of each campaign that no other test covers; ``make soak`` runs the whole."""

import importlib

import pytest


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize(("campaign", "runs"), [("disagreement", 12), ("death", 9)])
def test_the_first_runs_of_a_campaign_are_right(campaign: str, runs: int) -> None:
    figures = importlib.import_module(f"tests.soak.{campaign}").campaign(runs)
    assert figures["runs"] == runs
    assert not figures["failures"]

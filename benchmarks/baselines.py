"""Other schedules to compare with: Inductor's own overlap passes on our frontend, torchtitan where it is installed."""

from collections.abc import Mapping

from simplefsdp.rehearsal.systems import System

BASELINES: Mapping[str, System] = {}

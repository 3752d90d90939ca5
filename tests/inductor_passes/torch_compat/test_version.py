"""Which versions of torch are refused, warned of and accepted."""

import re
import warnings
from pathlib import Path

import pytest

from inductor_passes.torch_compat.version import NEWEST, OLDEST, check_version, parse

SETUP = Path(__file__).parents[3] / "setup.py"


def test_a_torch_older_than_the_oldest_supported_is_refused_and_both_versions_are_named():
    with pytest.raises(ImportError, match=re.escape("needs torch 2.11 or newer; torch 2.10.1+cu130 is installed")):
        check_version("2.10.1+cu130")


def test_a_torch_newer_than_the_newest_tested_is_warned_of_in_one_line():
    with pytest.warns(
        UserWarning, match=re.escape("tested with torch 2.11 to 2.15; torch 2.16.0.dev1 is newer")
    ) as said:
        check_version("2.16.0.dev1")
    assert [str(warning.message).count("\n") for warning in said] == [0]


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3"])
def test_a_supported_torch_is_accepted_without_a_word(version):
    with warnings.catch_warnings(action="error"):
        check_version(version)


def test_the_oldest_version_is_the_one_that_setup_requires():
    (required,) = re.findall(r'"torch>=([0-9.]+)"', SETUP.read_text())
    assert parse(required) == OLDEST < NEWEST

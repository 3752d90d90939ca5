"""Process groups that issue the collectives of a group together, and those that do not."""

import pytest
import torch

from inductor_passes.torch_compat import distributed
from inductor_passes.torch_compat.distributed import issues_groups, issues_groups_one_by_one
from inductor_passes.torch_compat.version import VERSION


@pytest.mark.parametrize(
    ("backend", "groups", "one_by_one"),
    [
        ("fake", True, False),
        ("rehearsal", True, False),
        ("gloo", False, False),
        (distributed.GROUPING_NCCL, True, False),
        ("nccl-of-another-kind", False, True),
    ],
)
@pytest.mark.usefixtures("one_of_four")
def test_which_backends_issue_groups(
    backend: str, groups: bool, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: backend)
    assert (issues_groups("0"), issues_groups_one_by_one("0")) == (groups, one_by_one)


def test_the_default_of_nccl_issues_groups_before_torch_2_15() -> None:
    assert (distributed.GROUPING_NCCL == "nccl") == (VERSION < (2, 15))

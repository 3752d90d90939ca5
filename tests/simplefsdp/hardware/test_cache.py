"""Profiles in this user's cache."""

import logging

import pytest
import torch

from simplefsdp.hardware.cache import cache_path, cached_profile_path
from simplefsdp.hardware.profile import load_profile, save
from tests.models import PROFILE

CPU = torch.device("cpu")


@pytest.mark.parametrize("content", [b"", b'{"name": "half of', b"\xff\xfe\x00\x80", b"[]", b"[" * 100_000])
def test_a_cached_profile_that_is_not_valid_is_set_aside_with_a_warning(tmp_path, monkeypatch, caplog, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path(CPU, 2)
    path.parent.mkdir()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "simplefsdp"):
        assert cached_profile_path(CPU, 2) is None
        assert cached_profile_path(CPU, 2) is None
    (message,) = caplog.messages
    assert f"was moved to {path.with_suffix('.invalid')}: profile file {path}: " in message
    assert path.with_suffix(".invalid").read_bytes() == content
    save(PROFILE, path)
    found = cached_profile_path(CPU, 2)
    assert found is not None
    assert load_profile(found) == PROFILE

"""Profiles in this user's cache."""

import logging
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from simplefsdp.hardware import cache
from simplefsdp.hardware.cache import cache_path, cached_profile_path
from simplefsdp.hardware.profile import load_profile, save
from tests.models import PROFILE
from tests.ranks import METHOD

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


def _measure_for(pid: int) -> None:
    os.environ[cache._OWNER] = str(pid)
    cache.end_with_owner()
    time.sleep(60)


def test_a_process_that_measures_ends_with_the_rank_that_started_it():
    context = multiprocessing.get_context(METHOD)
    rank = context.Process(target=time.sleep, args=(60,), daemon=True)
    rank.start()
    assert rank.pid is not None
    measures = context.Process(target=_measure_for, args=(rank.pid,), daemon=True)
    measures.start()
    measures.join(1)
    assert measures.is_alive()
    rank.kill()
    rank.join()
    measures.join(20)
    assert measures.exitcode == 1


def test_jobs_that_start_at_once_measure_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    measured = []

    def measure(path, ranks):
        measured.append(ranks)
        time.sleep(0.2)  # while the other job asks for the lock
        save(PROFILE, path)

    monkeypatch.setattr(cache, "_measure_in_own_processes", measure)
    with ThreadPoolExecutor(2) as jobs:
        found = list(jobs.map(lambda _: cache.measure_on_first_use(CPU, 2), range(2)))
    assert measured == [2]
    assert found == [cache_path(CPU, 2)] * 2

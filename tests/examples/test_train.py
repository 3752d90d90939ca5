"""The trainer, as a user starts it: on two ranks through torchrun."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from examples import data
from tests.ranks import TORCHRUN, torchrun

LAUNCH = [*TORCHRUN, "-m", "examples.train"]
SMALL = ["--batch-size", "2", "--seq-len", "32", "--sample", "0", "--lower-with", "aot_eager"]


def train(*flags: str, ranks: int = 2) -> str:
    return torchrun("-m", "examples.train", *flags, ranks=ranks)


def losses(folder: Path) -> list[float]:
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(len(metrics)))
    assert all(m["tokens_per_s"] > 0 and m["peak_memory_bytes"] > 0 and m["grad_norm"] > 0 for m in metrics)
    return [m["loss"] for m in metrics]


@pytest.mark.slow
def test_the_line_that_a_run_prints_resumes_it_bitwise(tmp_path):
    # Within the warm-up the learning rate does not depend on the number of steps.
    flags = [*SMALL, "--warmup", "100"]
    train(*flags, "--steps", "6", "--out", str(tmp_path / "whole"))
    flags += ["--out", str(tmp_path / "parts"), "--sample", "5", "--report-dir", str(report := tmp_path / "report")]
    printed = train(*flags, "--steps", "3")
    assert (report / "graph_0_0" / "09_backward_after_bucket.txt").exists()
    assert re.search(r"^validation loss \d+\.\d{3}$", printed, re.MULTILINE)
    assert re.search(r"^sample:\n +def ", printed, re.MULTILINE)
    assert (tmp_path / "parts" / "checkpoint_3" / ".metadata").exists()
    *_, line = printed.strip().splitlines()
    words = shlex.split(line)
    assert words[1 : len(LAUNCH)] == LAUNCH[1:]
    train(*words[len(LAUNCH) :])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


WATCHED = ["--wire-gather", "int8", "--wire-reduce", "int8", "--wire-errors-every", "5"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--mixed-precision", "bf16", "--activation-checkpointing", "selective", *WATCHED],
        ["--activation-checkpointing", "block", "--keep-unsharded", "--plan", "none", "--optimizer", "muon"],
        ["--optimizer", "ranger21", "--plan", "none"],
        ["--optimizer", "galore", "--moments", "factored", "--plan", "none"],
    ],
)
@pytest.mark.slow
def test_options_learn_a_repetitive_text(tmp_path, flags):
    text = tmp_path / "text"
    text.write_bytes(b"abcdefgh" * 500)
    out = tmp_path / "out"
    printed = train(*SMALL, *flags, "--data", str(text), "--out", str(out), "--steps", "20", "--warmup", "2")
    assert losses(out)[0] > 5
    found = re.search(r"^validation loss (\S+)$", printed, re.MULTILINE)
    assert found
    assert float(found[1]) < 2.5
    errors = re.findall(r"^step (\d+): wire error of (\w+) (\S+)% at most \(layers", printed, re.MULTILINE)
    steps = range(0, 20, 5) if "--wire-errors-every" in flags else []
    assert [(int(step), what) for step, what, _ in errors] == [
        (n, what) for n in steps for what in ("weights", "gradients")
    ]
    assert all(0 < float(error) < 3 for *_, error in errors)


@pytest.mark.slow
def test_a_run_of_which_a_rank_is_killed_goes_on_from_its_last_checkpoint(tmp_path):
    """Bitwise as if it had never stopped; then, when all of it is killed, on fewer ranks."""
    flags = [*SMALL, "--warmup", "1000", "--checkpoint-every", "5", "--resume", "newest"]
    train(*flags, "--steps", "40", "--out", str(tmp_path / "whole"))
    out = tmp_path / "killed"
    launch = [*LAUNCH[:-2], "--max-restarts", "1", *LAUNCH[-2:], *flags, "--out", str(out), "--steps", "1000"]
    # Otherwise ranks that are started again find the addresses of those before them, which are not there any more.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = subprocess.Popen(launch, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        steps_of(job, out, 12)
        *_, last = ranks = children(job.pid)
        os.kill(last, signal.SIGKILL)
        while not children(job.pid) or not set(children(job.pid)).isdisjoint(ranks):
            assert job.poll() is None, job.communicate()[1][-3000:]
            time.sleep(0.01)
        steps_of(job, out, 40)
    finally:
        for rank in children(job.pid):
            os.kill(rank, signal.SIGKILL)
        job.kill()
        job.communicate()
    until = len(losses(out))
    assert losses(out)[:40] == losses(tmp_path / "whole")
    printed = train(*flags, "--steps", str(until + 5), "--out", str(out), ranks=1)
    assert "on 1 ranks" in printed
    after = losses(out)
    assert len(after) == until + 5
    assert sum(after[until:]) / 5 < after[0] - 0.5


def steps_of(job: subprocess.Popen[str], folder: Path, number: int) -> None:
    """Wait until the run has logged so many steps."""
    deadline = time.monotonic() + 200
    while True:
        logged = folder / "metrics.jsonl"
        found = len(logged.read_text().splitlines()) if logged.exists() else 0
        if found >= number:
            return
        assert job.poll() is None, job.communicate()[1][-3000:]
        assert time.monotonic() < deadline, f"{found} steps"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in file.read_text().split()] if file.exists() else []


def test_the_default_text_is_python_and_none_of_it_is_in_both_parts():
    files = data.find_files(None)
    assert len(files) > 100
    assert all(path.suffix == ".py" for path in files)
    text, held_out = data.load(None, 256)
    assert len(text) + len(held_out) == sum(path.stat().st_size for path in files)
    assert len(held_out) > len(text) / 50


def test_text_may_be_a_file_a_folder_or_a_glob(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i]) * 10)
    (tmp_path / "other.md").write_bytes(b"x" * 10)
    text, held_out = data.load(str(tmp_path / "*.txt"), 5)
    assert sorted(set(held_out.tolist())) == [19, 39]
    assert sorted(set(text.tolist())) == [i for i in range(40) if i not in (19, 39)]
    assert len(data.find_files(str(tmp_path))) == 41
    text, held_out = data.load(str(tmp_path / "00.txt"), 0)
    assert (len(text), len(held_out)) == (9, 1)


def test_too_little_text_is_said(tmp_path):
    with pytest.raises(SystemExit, match=r"--data .*nothing: 0 files leave 0 bytes of training text"):
        data.load(str(tmp_path / "nothing"), 5)


def test_crops_are_followed_by_their_targets():
    text = data.load(None, 256)[0][:100]
    tokens, targets = data.crops(text, starts=text.new_tensor([0, 7]).long(), seq_len=5)
    assert tokens.tolist() == [text[0:5].tolist(), text[7:12].tolist()]
    assert targets.tolist() == [text[1:6].tolist(), text[8:13].tolist()]

"""torchtitan's own trainer, as a user starts it, with simplefsdp and with its own FSDP2, on ranks without a GPU."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.ranks import TORCHRUN, run

pytestmark = pytest.mark.slow
pytest.importorskip("torchtitan")
pytest.importorskip("tyro")  # a torchtitan without what it needs

MODULE = "tests.examples.torchtitan_on_cpu"
COMMON = {
    "training.local_batch_size": 2,
    "training.seq_len": 32,
    "training.steps": 3,
    "debug.seed": 1,
    "checkpoint.interval": 1,
}


def train(config: str, out: Path, ranks: int = 2, *, checkpointing: str = "none", **flags: Any) -> str:
    """Train and return the log. A flag ``a__b`` is torchtitan's ``--a.b``."""
    launch = [*TORCHRUN[:-1], str(ranks), "-m", MODULE, "--module", MODULE, "--config", config]
    given = COMMON | {name.replace("__", "."): value for name, value in flags.items()}
    if config == "ours":
        given |= {"compile.backend": "aot_eager", "compile.plan": "block", "compile.report_dir": out / "report"}
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    options += ["--checkpoint.enable", "--dump_folder", str(out), f"activation_checkpoint:{checkpointing}"]
    return run([*launch, *options])


def losses(log: str) -> list[float]:
    steps = dict(re.findall(r"step: +(\d+) .*?loss: +([\d.]+)", log))
    return [float(steps[step]) for step in sorted(steps)]


def checkpoint(out: Path, step: int = 3) -> dict[str, torch.Tensor]:
    """Weights and moments of the optimizer, put together."""
    dcp_to_torch_save(out / "checkpoint" / f"step-{step}", out / "whole.pt")
    return dict(tensors(torch.load(out / "whole.pt", weights_only=False)))


def tensors(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, value in tree.items():
        if isinstance(value, dict):
            found += tensors(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            found.append((prefix + name, value))
    return found


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, {"training__global_batch_size": 8, "checkpointing": "selective"}, id="accumulated"),
        pytest.param(
            4,
            {
                "parallelism__tensor_parallel_degree": 2,
                "parallelism__fsdp_reshard_after_forward": "never",
                "training__mixed_precision_param": "float32",
                "checkpointing": "full",
            },
            id="tensor-parallel",
        ),
        pytest.param(4, {"parallelism__data_parallel_replicate_degree": 2}, id="hybrid"),
        pytest.param(
            2,
            {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1},
            id="replicated",
        ),
    ],
)
def test_three_steps_are_bitwise_those_of_torchtitans_fsdp2(tmp_path: Path, ranks: int, flags: dict[str, Any]) -> None:
    logs = [train(config, tmp_path / config, ranks, **flags) for config in ("theirs", "ours")]
    assert len(losses(logs[0])) == 3
    assert losses(logs[1]) == losses(logs[0])
    theirs, ours = (checkpoint(tmp_path / config) for config in ("theirs", "ours"))
    assert list(ours) == list(theirs)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    (compiled,) = (tmp_path / "ours" / "report").iterdir()  # one graph: it does not break
    assert "layers.1" in (compiled / "09_backward_after_bucket.txt").read_text()


def test_a_checkpoint_of_one_process_is_trained_on(tmp_path: Path) -> None:
    """Training goes on on two ranks, within rounding of the process that wrote the checkpoint."""
    flags = {"training__mixed_precision_param": "float32"}
    alone = train("theirs", tmp_path / "alone", 1, training__local_batch_size=4, **flags)
    first = Path("checkpoint", "step-1")
    shutil.copytree(tmp_path / "alone" / first, tmp_path / "shared" / first)
    shared = train("ours", tmp_path / "shared", 2, **flags)
    assert losses(shared) == pytest.approx(losses(alone)[1:], abs=2e-5)
    expected, found = checkpoint(tmp_path / "alone"), checkpoint(tmp_path / "shared")
    moments = [name for name in expected if name.endswith("exp_avg")]
    assert len(moments) > 15
    for name in moments:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-6, msg=name)


def test_unsupported_torchtitan_flags_are_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"NotImplementedError: context parallelism: not supported"):
        train("ours", tmp_path, 2, parallelism__context_parallel_degree=2)

"""torchtitan's command line where there is no GPU: ``-m tests.examples.torchtitan_on_cpu`` for ``-m torchtitan.train``.

torchtitan asks for the device of this machine once, in ``torchtitan.tools.utils``, and without a GPU takes CUDA for it.
Here it is told "cpu", before any other of its modules reads that. It also has configurations small enough for a test.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

if __name__ == "__main__":
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda _: None,
        synchronize=lambda: None,
        get_device_name=lambda _: "cpu",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1),
        memory_stats=lambda _: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    if not hasattr(dist, "set_timeout"):  # torch 2.13 has it under another name
        dist.set_timeout = distributed_c10d._set_pg_timeout

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.train import main
from torchtitan.trainer import Trainer

from examples.torchtitan import with_simple_fsdp


class NoTokenizer(BaseTokenizer):
    """A tokenizer for text that is token numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class RandomTokens(BaseDataLoader):
    """Row after row of random tokens: the global batch of a step is the same however many ranks share it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = 2048

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ):
        self.vocab_size, self.seq_len = config.vocab_size, seq_len
        self.rows, self.all_rows = local_batch_size, dp_world_size * local_batch_size
        self.first_row = dp_rank * local_batch_size
        self.batch = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.batch * self.all_rows + self.first_row
            rows = torch.stack([self.row(first + i) for i in range(self.rows)])
            self.batch += 1
            yield {"input": rows[:, :-1]}, rows[:, 1:]

    def row(self, number: int) -> Tensor:
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=torch.Generator().manual_seed(number))

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch = state_dict["batch"]


def parallelize_for_gloo(*args: Any, **kwargs: Any) -> nn.Module:
    """torchtitan's function; a divide factor of 1 is a reduction that gloo does not have, a sum is the same."""
    model = parallelize_llama(*args, **kwargs)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def theirs() -> Trainer.Config:
    """torchtitan's debug model, of two layers, without FlexAttention, which has no backward on CPU; FSDP2."""
    config = llama3.llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.parallelize_fn = parallelize_for_gloo
    config.dataloader = RandomTokens.Config()
    config.tokenizer = NoTokenizer.Config()
    config.loss = config.loss.loss_fn
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.disable_cuda_graphs = True
    return config


def ours() -> Trainer.Config:
    return with_simple_fsdp(theirs())


if __name__ == "__main__":
    main()

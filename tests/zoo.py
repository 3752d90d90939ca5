"""Modules that hold their parameters in unusual ways. Each maps (batch, 6) to (batch, 6)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

DIM = 6


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.5 * layer(x)
        return x


class Slices(nn.Module):
    """Calls parts of its containers, as early exits and pipelines do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.sequence = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers[1:], *self.layers[:1]):
            x = x + 0.5 * layer(x)
        return self.sequence[1:](self.sequence[:1](x))


class Checkpointed(Residual):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        # A first layer that sees an input without gradient would be left out.
        return super().forward(x if x.requires_grad else x.detach().requires_grad_())


class Parameters(nn.Module):
    """A module with one parameter, and what it does with it."""

    def __init__(self, weight: Tensor, requires_grad: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=requires_grad)


class FewerRowsThanRanks(Parameters):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Scalar(Parameters):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Empty(Parameters):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x @ self.weight.t()), -1) * 1.1


class NotContiguous(Parameters):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class BFloat16(Parameters):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.float()


class Complex(Parameters):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).real


class Integer(Parameters):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.weight]


class OneByte(Parameters):
    """A mask, or a scale that is stored in float8; uneven on two ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * (x @ self.weight.to(x.dtype).t()).sum(-1, keepdim=True)


class Three(Parameters):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.sum(1)


class NoneParameter(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is None
        return super().forward(x)


class InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(DIM, DIM) * 0.3, torch.randn(DIM)])

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weights
        return nn.functional.linear(x, self.weights[0] + 0 * weight, bias)


class InDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"up": torch.randn(DIM, DIM) * 0.3, "bias": torch.randn(DIM)})

    def forward(self, x: Tensor) -> Tensor:
        bias: Any = self.weights.bias
        return nn.functional.linear(x, self.weights["up"], bias)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh()) + x * self.inner.bias


class Sometimes(nn.Module):
    """One layer is used where the number of rows is divisible by 3, the other elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(x) if x.shape[0] % 3 == 0 else self.even(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Buffers(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight


class ReadsItsChild(nn.Module):
    """A module that reads its child's weight, as ``nn.MultiheadAttention`` reads that of ``out_proj``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight.t(), self.inner.bias)


class ForwardsAttributes(nn.Module):
    """A wrapper that hands unknown attributes to what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.bias


class OtherMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def decode(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Vmapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.inner)(x) + torch.func.jvp(self.inner, (x,), (x,))[1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        # Every sample attends to itself alone: the result must not depend on who else is in the batch.
        x = torch.stack((x, x.flip(-1)), 1)
        return self.attention(x, x, x)[0].mean(1)


class Recurrent(nn.Module):
    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(3, DIM, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unflatten(-1, (2, 3)))[0][:, -1]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1)).sum(1)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((x[:, 0].abs() * 2).long() % 5) + x


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, DIM)), nn.TransformerEncoder(layer, 2), nn.Flatten())


ODD_COMPLEX = "complex behind an odd number of values"

PARAMETERS: dict[str, Callable[[], nn.Module]] = {
    "fewer rows than ranks": lambda: FewerRowsThanRanks(torch.randn(1, DIM)),
    "0-dim": lambda: Scalar(torch.tensor(1.5)),
    "zero-size": lambda: Empty(torch.empty(0, DIM)),
    "None": NoneParameter,
    "non-contiguous": lambda: NotContiguous((torch.randn(DIM, DIM) * 0.3).t()),
    "bf16 beside fp32": lambda: nn.Sequential(nn.Linear(DIM, DIM), BFloat16(torch.randn(DIM, dtype=torch.bfloat16))),
    "complex": lambda: Complex(torch.randn(DIM, dtype=torch.complex64)),
    ODD_COMPLEX: lambda: nn.Sequential(
        FewerRowsThanRanks(torch.randn(1, 1)), Complex(torch.randn(DIM, dtype=torch.complex64))
    ),
    "integer": lambda: Integer(torch.randperm(DIM), requires_grad=False),
    "bool": lambda: OneByte(torch.randn(5, DIM) > 0, requires_grad=False),
    "float8": lambda: OneByte(torch.randn(5, DIM).to(torch.float8_e4m3fn), requires_grad=False),
    "three dims": lambda: Three(torch.randn(DIM, 5, DIM) * 0.2),
    "in a ParameterList": InList,
    "in a ParameterDict": InDict,
    "used twice": UsedTwice,
    "tied": Tied,
    "LoRA": Lora,
    "bias that backward does not need": lambda: nn.Linear(DIM, DIM),
    "beside buffers": Buffers,
    "read by its parent": ReadsItsChild,
    "embedding": Embedded,
    "convolution": Convolution,
}

MODULES: dict[str, Callable[[], nn.Module]] = {
    "MultiheadAttention": Attention,
    "TransformerEncoder": encoder,
    "LSTM": Recurrent,
    "GRU": lambda: Recurrent(nn.GRU),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(DIM, DIM)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(DIM, DIM)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(DIM, DIM)),
    "weight_norm with hooks": lambda: torch.nn.utils.weight_norm(nn.Linear(DIM, DIM)),
    "torch.func": Vmapped,
    "custom __getattr__": ForwardsAttributes,
    "other methods": OtherMethods,
    "slices": Slices,
    "checkpoint": lambda: Checkpointed(nn.Linear(DIM, DIM), UsedTwice()),
    "reentrant checkpoint": lambda: CheckpointedReentrant(nn.Linear(DIM, DIM), UsedTwice()),
}

NOT_IN_ONE_GRAPH = ("LSTM", "GRU", "weight_norm with hooks", "orthogonal", "reentrant checkpoint")
"""Models that Dynamo does not trace in one graph: there the compiled model has graph breaks."""


def build(name: str) -> nn.Module:
    """A module of either collection between two linear layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), {**PARAMETERS, **MODULES}[name](), nn.Linear(DIM, DIM))

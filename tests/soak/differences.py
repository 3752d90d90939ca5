"""Differences between ranks, one function each: the odd rank does something that the others do not."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from simplefsdp import WireFormat, manual_plan, simple_fsdp

WIDTH = 8


class Net(nn.Module):
    """Square layers that a call runs in the order of ``numbers``, between an embedding and an output layer."""

    def __init__(self, layers: int = 3, width: int = WIDTH):
        super().__init__()
        self.embed = nn.Linear(WIDTH, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.out = nn.Linear(width, WIDTH)
        self.is_checkpointed = False

    def forward(self, x: Tensor, numbers: Sequence[int] | None = None) -> Tensor:
        x = self.embed(x)
        for number in range(len(self.layers)) if numbers is None else numbers:
            layer = self.layers[number]
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.out(x)


@dataclass
class Trial:
    """One rank's part in a run: what it trains, and what it has done since the difference was planted."""

    mesh: DeviceMesh
    mode: str
    is_odd: bool
    is_compiled: bool
    planted_at: float | None = None
    """Seconds of ``time.monotonic`` when this rank began to differ."""
    steps: int = 0
    """Steps of the optimizer that have ended since."""
    forward: Any = None
    """The sharded model, compiled if this run compiles."""

    def plant(self) -> None:
        """Begin to differ."""
        self.planted_at = time.monotonic()

    def trainer(self, net: nn.Module, options: dict[str, Any] | None = None, **settings: Any) -> Callable[..., None]:
        """Shard ``net``, compile it if this run compiles, and return a function that trains one step."""
        model: Any = simple_fsdp(net, self.mesh, **{"mode": self.mode, **settings})
        self.forward = model
        if self.is_compiled:
            given: Any = {"lower_with": "aot_eager", "plan": "block", **(options or {})}
            self.forward = torch.compile(model, backend="simplefsdp", options=given)
        optimizer = optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)

        def step(numbers: Sequence[int] | None = None, micro_batches: int = 1) -> None:
            for _ in range(micro_batches):
                self.forward(torch.ones(2, WIDTH), numbers).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.steps += self.planted_at is not None

        return step

    def step_before(self, net: nn.Module) -> Callable[..., None]:
        """Train ``net`` a step as all ranks do, and begin to differ; return the function that trains the next one."""
        step = self.trainer(net)
        step()
        self.plant()
        return step


def net(seed: int = 0, **shape: int) -> Any:
    torch.manual_seed(seed)
    return Net(**shape)


def initial_weights(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(seed=int(trial.is_odd)))()


def weight_turned(trial: Trial) -> None:
    model = net()
    model.layers[1].extra = nn.Parameter(torch.ones((4, 6) if trial.is_odd else (6, 4)))
    trial.plant()
    trial.trainer(model, check_initial_weights=False)()


def width(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(width=12 if trial.is_odd else WIDTH))()


def number_of_layers(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(layers=4 if trial.is_odd else 3))()


def names_of_layers(trial: Trial) -> None:
    model = net()
    if trial.is_odd:
        model.layers[0], model.layers[1] = model.layers[1], model.layers[0]
    trial.plant()
    trial.trainer(model)()


def dtype(trial: Trial) -> None:
    model = net()
    if trial.is_odd:
        model.layers[1].double()
        model.layers[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        model.layers[1].register_forward_hook(lambda *args: args[2].float())
    trial.plant()
    trial.trainer(model, check_initial_weights=False)()


def frozen_at_wrapping(trial: Trial) -> None:
    model = net()
    model.layers[1].weight.requires_grad_(not trial.is_odd)
    trial.plant()
    trial.trainer(model)()


def frozen_later(trial: Trial) -> None:
    model = net()
    step = trial.step_before(model)
    model.layers[1].weight.requires_grad_(not trial.is_odd)
    step()


def plan(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(), {"plan": "none" if trial.is_odd else "block"})()


def prefetch(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(), {"plan": manual_plan(["layers.*"], prefetch=int(trial.is_odd))})()


def inductor_option(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(), {"inductor": {"epilogue_fusion": trial.is_odd}})()


def torch_version(trial: Trial) -> None:
    trial.plant()
    with mock.patch.object(torch, "__version__", "2.13.99" if trial.is_odd else torch.__version__):
        trial.trainer(net())()


def reduce_dtype(trial: Trial) -> None:
    trial.plant()
    dtype = torch.float32 if trial.is_odd else torch.bfloat16
    trial.trainer(net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, dtype))()


def divide_factor(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(), gradient_divide_factor=1.0 if trial.is_odd else 4.0)()


def divide_factor_later(trial: Trial) -> None:
    model = net()
    step = trial.step_before(model)
    if trial.is_odd:
        model.set_gradient_divide_factor(8.0)
    step()


def reshard_after_forward(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(), reshard_after_forward=not trial.is_odd)()


def shard_dim(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(), shard_placement_fn=lambda param: Shard(param.ndim - 1 if trial.is_odd else 0))()


def wire_format(trial: Trial) -> None:
    trial.plant()
    trial.trainer(net(), wire=WireFormat(gather="int8") if trial.is_odd else WireFormat())()


def ignored_parameter(trial: Trial) -> None:
    model = net()
    trial.plant()
    trial.trainer(model, ignored_params=[model.layers[1].bias] if trial.is_odd else [])()


def skipped_layer(trial: Trial) -> None:
    step = trial.step_before(net())
    step([0, 2] if trial.is_odd else [0, 1])


def order_of_layers(trial: Trial) -> None:
    step = trial.step_before(net())
    step([1, 0, 2] if trial.is_odd else [0, 1, 2])


def one_layer_more(trial: Trial) -> None:
    step = trial.step_before(net())
    step([0, 1, 2] if trial.is_odd else [0, 1])


def one_micro_batch_more(trial: Trial) -> None:
    step = trial.step_before(net())
    step(micro_batches=1 + trial.is_odd)


def checkpointed_layers(trial: Trial) -> None:
    model = net()
    step = trial.trainer(model)
    trial.plant()
    model.is_checkpointed = trial.is_odd
    step()


def gradient_sync(trial: Trial) -> None:
    model = net()
    step = trial.step_before(model)
    if trial.is_odd:
        model.set_requires_gradient_sync(False)
    step()


def skipped_step(trial: Trial) -> None:
    step = trial.step_before(net())
    if not trial.is_odd:
        step()


def repeated_step(trial: Trial) -> None:
    step = trial.step_before(net())
    for _ in range(1 + trial.is_odd):
        step()


def no_backward(trial: Trial) -> None:
    step = trial.step_before(net())
    if trial.is_odd:
        with torch.no_grad():
            trial.forward(torch.ones(2, WIDTH), None)
    step()


class Difference(NamedTuple):
    plant: Callable[[Trial], None]
    ways: str = "ec"
    """``"e"``: eager code can differ like this, ``"c"``: compiled code can."""
    told: str = ""
    """A regular expression that is found in what every rank is told."""
    steps_when_compiled: int = 0
    """Steps that a compiled run takes until it can be told: its optimizer does not wait for other ranks."""
    at_timeout: bool = False
    """Whether nobody can know before the timeout: the other ranks wait for a rank that never comes."""


DIFFERENCES = {each.plant.__name__: each for each in (
    Difference(initial_weights, told=r"initial value of embed.weight"),
    Difference(weight_turned, told=r"layers.1.extra: shape=\((4, 6|6, 4)\)"),
    Difference(width, told=r"embed.weight: shape=\((8|12), 8\)"),
    Difference(number_of_layers, told=r"layers.3"),
    Difference(names_of_layers, told=r"initial value of layers.0.weight"),
    Difference(dtype, told=r"layers.1.weight"),
    Difference(frozen_at_wrapping, told=r"layers.1.weight is (frozen|trained)"),
    Difference(frozen_later, told=r"layers.1"),
    Difference(plan, "c", r"plan (block|none)"),
    Difference(prefetch, "c", r"prefetch=[01]"),
    Difference(inductor_option, "c", r"epilogue_fusion=(True|False)"),
    Difference(torch_version, "c", r"torch 2.13.99"),
    Difference(reduce_dtype, told=r"reduce_dtype=torch.(bfloat16|float32)"),
    Difference(divide_factor, told=r"divide_factor=[14].0"),
    Difference(divide_factor_later, told=r"divide"),
    Difference(reshard_after_forward, told=r"embed"),
    Difference(shard_dim, told=r"embed.weight: .*dim=[01]"),
    Difference(wire_format, told=r"int8"),
    Difference(ignored_parameter, told=r"layers.1.bias"),
    Difference(skipped_layer, told=r"layers.[12].(weight|bias)"),
    Difference(order_of_layers, told=r"layers.[01].(weight|bias)"),
    Difference(one_layer_more, told=r"layers.2"),
    Difference(one_micro_batch_more, told=r"embed.weight", steps_when_compiled=1),
    Difference(checkpointed_layers, told=r"layers"),
    Difference(gradient_sync, told=r"gradient|reduce_scatter|all_reduce"),
    Difference(no_backward, told=r"embed.weight"),
    Difference(skipped_step, at_timeout=True),
    Difference(repeated_step, at_timeout=True),
)}  # fmt: skip

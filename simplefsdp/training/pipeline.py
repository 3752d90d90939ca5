"""Pipeline parallelism over sharded stages: torch's schedules, gradients reduced once a step."""

from typing import Any

from torch import nn
from torch.distributed import pipelining

from simplefsdp.frontend.fsdp_methods import FSDPMethods
from simplefsdp.frontend.gradient_accumulation import reduce_now, sharded_attributes


class PipelineStage(pipelining.PipelineStage):
    """``torch.distributed.pipelining.PipelineStage`` of a module that ``simple_fsdp`` has sharded over the ranks that
    hold this stage::

        part = torch.compile(simple_fsdp(part, mesh["dp"]), backend="simplefsdp")
        stage = PipelineStage(part, index, stages, device, group=mesh["pp"].get_group())
        Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn).step(tokens)

    Gradients of microbatches are added up on each rank, as after ``set_requires_gradient_sync(False)``, and reduced
    when the schedule has come to the end of its step. With torch's own class they would be reduced for each microbatch.

    In a schedule that computes the gradients of inputs and of weights apart (zero bubble) both are computed where it
    asks for the first: right, but without filling its bubbles.

    Args:
        submodule: sharded by ``simple_fsdp``, compiled or not; its methods of ``FSDPModule`` are then the stage's.
        args, kwargs: as torch's class has them.

    Raises:
        TypeError: ``submodule`` is not sharded.

    Source: ``torch.distributed.pipelining``, which does the same for ``FSDPModule``.
    """

    submod: Any

    def __init__(self, submodule: nn.Module, *args: Any, **kwargs: Any):
        if not isinstance(getattr(submodule, "_orig_mod", submodule), FSDPMethods):
            raise TypeError(
                f"submodule: expected a module that simple_fsdp() has sharded, found {type(submodule).__name__}; for "
                "others there is torch.distributed.pipelining.PipelineStage"
            )
        super().__init__(submodule, *args, **kwargs)
        self.submod.set_requires_gradient_sync(False)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce what was added up since the last call, divide it by ``grad_scale_factor``, and add it to the
        gradients. After an evaluation, when torch calls this too, there is nothing to add."""
        before = [(param, param.grad) for param in self.submod.parameters()]
        for param, _ in before:
            param.grad = None  # what is there already has been divided
        reduce_now(sharded_attributes(self.submod))
        super().perform_reduce_grad(grad_scale_factor)
        for param, gradient in before:
            if gradient is not None:
                param.grad = gradient if param.grad is None else gradient + param.grad

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The whole backward of a microbatch, also where ``full_backward`` is ``False``."""
        del full_backward
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Nothing is left of it."""

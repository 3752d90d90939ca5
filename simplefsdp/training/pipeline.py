"""Pipeline parallelism over sharded stages: torch's schedules, gradients reduced once a step."""

from typing import Any

from torch import nn
from torch.distributed import pipelining

from simplefsdp.frontend.fsdp_methods import FSDPMethods
from simplefsdp.frontend.gradient_accumulation import reduce_now, sharded_attributes


class PipelineStage(pipelining.PipelineStage):
    """A pipeline stage whose module ``simple_fsdp`` has sharded over the ranks that hold the stage.

    As ``torch.distributed.pipelining.PipelineStage``, of which it is a subclass::

        part = torch.compile(simple_fsdp(part, mesh["dp"]), backend="simplefsdp")
        stage = PipelineStage(part, index, stages, device, group=mesh["pp"].get_group())
        Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn).step(tokens)

    Gradients of micro-batches are accumulated on each rank, as after ``set_requires_gradient_sync(False)``, and reduced
    at the end of the schedule's step. Torch's own class would reduce them for each micro-batch.

    A schedule may ask for the gradients of inputs and of weights apart (zero bubble). Both are then computed when the
    schedule asks for the first: results are right, but the bubbles of the schedule are not filled.

    Args:
        submodule: sharded by ``simple_fsdp``, compiled or not; its methods of ``FSDPModule`` become the stage's.
        args, kwargs: as of torch's class.

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
        """Run the whole backward of a micro-batch, also where ``full_backward`` is ``False``."""
        del full_backward
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Do nothing: ``backward_one_chunk`` has computed these gradients."""

"""``ErrorFeedback``: rounding errors that replicas feed back, for checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from inductor_passes.torch_compat.dtensor import StridedShard, dtensor, local_tensor
from simplefsdp.frontend.gradient_accumulation import ShardedAttribute, sharded_attributes


class ErrorFeedback:
    """Rounding errors that a model with ``WireFormat(error_feedback=True)`` keeps from step to step: a ``Stateful`` of
    ``torch.distributed.checkpoint``.

    ::

        state = {"model": model.state_dict(), "error_feedback": ErrorFeedback(model)}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)      # and load

    A run that is resumed without it starts from errors of zero, and so does one with another number of replicas, which
    leaves it out when it loads: each replica has errors of its own.

    Args:
        model: what ``simple_fsdp`` or ``torch.compile`` returned.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no parameter of ``model`` feeds errors back, or its weights are on ``meta``.
    """

    def __init__(self, model: nn.Module):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
        self._model = getattr(model, "_orig_mod", model)
        found = self._attributes()
        if not found:
            raise ValueError("model: no parameter feeds errors back; see WireFormat(error_feedback=True)")
        if on_meta := [fqn for fqn, each in found.items() if each.param.is_meta]:
            raise ValueError(f"model: {on_meta[0]} is on meta and has no errors yet")

    def state_dict(self) -> dict[str, DTensor]:
        """Return the errors of each parameter by FQN, (replicas, *shape of the parameter), float32; no copies."""
        return {fqn: _errors(each) for fqn, each in self._attributes().items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy errors from what ``state_dict`` returned, here or on the same rank of a run with as many.

        Raises:
            ValueError: other parameters, or another number of replicas; nothing was copied.
        """
        own = self.state_dict()
        for fqn in [*own, *state_dict]:
            here, given = (tuple(of[fqn].shape) if fqn in of else None for of in (own, state_dict))
            if here != given:
                raise ValueError(f"error_feedback: {fqn}: errors of shape {given} were given, {here} are here")
        for fqn, errors in own.items():
            local_tensor(errors).copy_(local_tensor(state_dict[fqn]))

    def _attributes(self) -> dict[str, ShardedAttribute]:
        return {each.info.fqn: each for each in sharded_attributes(self._model) if each.info.communication.feeds_back}


def _errors(each: ShardedAttribute) -> DTensor:
    """Return the errors of a parameter in its own layout, with one more dim for replicas in front."""
    info, dim = each.info, each.info.communication.dim or 0
    encoded = each.param._local_tensor.movedim(dim, 0)
    local = info.model.errors[info.fqn].view(encoded.shape).movedim(0, dim).unsqueeze(0)
    # The first dimension of the mesh is that of replicas.
    placements = Shard(0), *map(_behind_replicas, each.param.placements[1:])
    mesh = each.param.device_mesh
    return dtensor(local, mesh, placements, torch.Size([mesh.size(0), *each.param.shape]))


def _behind_replicas(placement: Placement) -> Any:
    if isinstance(placement, StridedShard):
        return StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement

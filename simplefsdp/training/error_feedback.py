"""``ErrorFeedback``: rounding errors that replicas feed back, for checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from inductor_passes.torch_compat.dtensor import StridedShard, dtensor, local_tensor


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
        found = self._params()
        if not found:
            raise ValueError("model: no parameter feeds errors back; see WireFormat(error_feedback=True)")
        if on_meta := [fqn for fqn, param in found.items() if param.is_meta]:
            raise ValueError(f"model: {on_meta[0]} is on meta and has no errors yet")

    def state_dict(self) -> dict[str, DTensor]:
        """Return the errors of each parameter by FQN, (replicas, *shape of the parameter), float32; no copies."""
        return {fqn: _errors(param) for fqn, param in self._params().items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy errors from what ``state_dict`` returned, here or on the same rank of a run with as many.

        Raises:
            TypeError: a value is no ``DTensor``.
            ValueError: other parameters, or another number of replicas; in all cases nothing was copied.
        """
        own = self.state_dict()
        for fqn in [*own, *state_dict]:
            here, given = (tuple(of[fqn].shape) if fqn in of else None for of in (own, state_dict))
            if here != given:
                raise ValueError(f"error_feedback: {fqn}: errors of shape {given} were given, {here} are here")
            if not isinstance(state_dict[fqn], DTensor):
                raise TypeError(f"error_feedback: {fqn}: expected a DTensor, found {type(state_dict[fqn]).__name__}")
        for fqn, errors in own.items():
            local_tensor(errors).copy_(local_tensor(state_dict[fqn]))

    def _params(self) -> dict[str, Any]:
        named: dict[str, Any] = dict(self._model.named_parameters())
        infos = {fqn: getattr(param, "simple_fsdp_info", None) for fqn, param in named.items()}
        return {fqn: named[fqn] for fqn, info in infos.items() if info is not None and info.communication.feeds_back}


def _errors(param: Any) -> DTensor:
    """Return the errors of a parameter in its own layout, with one more dim for replicas in front."""
    info, mesh = param.simple_fsdp_info, param.device_mesh
    dim = info.communication.dim
    encoded = local_tensor(param).movedim(dim, 0)
    local = info.model.errors[info.fqn].view(encoded.shape).movedim(0, dim).unsqueeze(0)
    # The first dimension of the mesh is that of replicas.
    placements = Shard(0), *map(_behind_replicas, param.placements[1:])
    return dtensor(local, mesh, placements, torch.Size([mesh.size(0), *param.shape]))


def _behind_replicas(placement: Placement) -> Any:
    if isinstance(placement, StridedShard):
        return StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement

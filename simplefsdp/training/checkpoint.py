"""Load planners that list all differences between a checkpoint and a model before anything is read."""

from dataclasses import replace

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan


class StrictLoadPlanner(DefaultLoadPlanner):
    """A load planner for checkpoints whose names and shapes must be those of the model.

    ``torch.distributed.checkpoint.load(state, planner=StrictLoadPlanner(), ...)``. Torch's own planner names the first
    difference only, and ignores entries that only the checkpoint has. This planner lists all of them, as far as their
    first name is also in any rank's ``state``: with ``{"model": ...}`` it lists other parameters that were saved as
    ``"model"``, but not what was saved as ``"optimizer"``.

    Raises:
        CheckpointException (by ``load``, on every rank): there are differences; nothing was read.
    """

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        wrong = []
        for name, value in self.state_dict.items():
            entry = saved.get(name)
            if entry is None:
                wrong.append(f"{name}: not in the checkpoint")
            elif isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
                wrong.append(f"{name}: {tuple(entry.size)} in the checkpoint, {tuple(value.shape)} here")
        plan = LoadPlan([]) if wrong else super().create_local_plan()
        return replace(plan, planner_data=(wrong, list(self.state_dict)))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert self.metadata is not None
        wrong = dict.fromkeys(line for plan in global_plan for line in plan.planner_data[0])
        here = {name for plan in global_plan for name in plan.planner_data[1]}
        first = {name.split(".")[0] for name in here}
        saved = self.metadata.state_dict_metadata
        more = [f"{name}: not here" for name in saved if name not in here and name.split(".")[0] in first]
        if wrong or more:
            raise ValueError("the checkpoint does not fit:\n  " + "\n  ".join([*wrong, *more]))
        return super().create_global_plan(global_plan)

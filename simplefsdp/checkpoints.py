"""Loading a checkpoint that does not fit: what differs, all of it, before anything is read."""

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan


class StrictLoadPlanner(DefaultLoadPlanner):
    """For ``torch.distributed.checkpoint.load(state, planner=StrictLoadPlanner(), ...)``: names and shapes must be
    those of the checkpoint.

    Torch's planner names the first that differs, and takes no notice of what only the checkpoint has. Of that, this one
    lists what is under the same first name as something in ``state``: with ``{"model": ...}`` all other parameters that
    were saved as ``"model"``, but not what was saved as ``"optimizer"``.

    Raises:
        CheckpointException (by ``load``, on every rank): there are differences; nothing was read.
    """

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        wrong = []
        for name, value in self.state_dict.items():
            there = saved.get(name)
            if there is None:
                wrong.append(f"{name}: not in the checkpoint")
            elif isinstance(value, Tensor) and isinstance(there, TensorStorageMetadata) and there.size != value.shape:
                wrong.append(f"{name}: {tuple(there.size)} in the checkpoint, {tuple(value.shape)} here")
        first = {name.split(".")[0] for name in self.state_dict}
        wrong += [f"{name}: not here" for name in saved if name not in self.state_dict and name.split(".")[0] in first]
        if wrong:
            raise ValueError("the checkpoint does not fit:\n  " + "\n  ".join(wrong))
        return super().create_local_plan()

"""The options with which ``torch.distributed.checkpoint`` reads an optimizer, whose hooks are not told of them."""

import sys
from typing import Any


def options_of_full_state() -> Any:
    """Return torch's ``StateDictOptions`` if a function of it that calls reads the whole state of an optimizer.

    That is ``get_optimizer_state_dict`` or ``get_state_dict`` with ``full_state_dict=True``. ``None`` for any other
    caller.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        is_torchs = frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        if is_torchs and frame.f_code.co_name == "_get_optim_state_dict":
            options = frame.f_locals["info"]
            return options if options.full_state_dict else None
        frame = frame.f_back
    return None

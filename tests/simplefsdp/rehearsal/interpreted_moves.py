"""The kernel that copies what a rehearsed collective brings, run by Triton's interpreter.

``test_moves.py`` runs this module in a process of its own, whose Triton is the interpreter.
"""

import torch

from simplefsdp.rehearsal.channel import Move
from simplefsdp.rehearsal.cuda import carry


def test_all_members_of_a_group_are_copied_whatever_their_sizes() -> None:
    sources = [torch.arange(n, dtype=torch.float32) + n for n in (1, 7, 4096, 4097, 20000)]
    sources += [torch.arange(10, dtype=torch.bfloat16), torch.arange(5, dtype=torch.bfloat16), torch.zeros(0)]
    outs = [torch.full((3 * len(source) + 4,), -1, dtype=source.dtype) for source in sources]
    moves = [Move(out[2:-2], source) for out, source in zip(outs, sources, strict=True)]
    scaled = torch.empty(4096)
    carry([*moves, Move(scaled, sources[2], 3.0)], programs=3)
    for out, source in zip(outs, sources, strict=True):
        assert torch.equal(out[2:-2], source.repeat(3))
        assert (out[:2] == -1).all()
        assert (out[-2:] == -1).all()
    assert torch.equal(scaled, 3 * sources[2])

"""Make the cost graph of a model with many equal blocks from the cost graph of a model with a few.

Blocks are alike in what their compute costs and in what they leave in memory, but for the first and the last ones,
around which partitioners save other things. So the piece of a graph between the same place of two neighbouring blocks,
if it is like the piece behind it, can be put in as often as there are blocks more.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from inductor_passes.scheduling.cost_graph import CostGraph, Gather, Reduction

Numbered = Callable[[str], int | None]
"""The number of the block that a parameter, by its FQN, is part of."""
Renamed = Callable[[str, int], str]
"""The FQN of the same parameter of another block."""


class BlocksDifferError(ValueError):
    """The blocks of a graph cannot be told apart, or differ."""


def repeat_blocks(graph: CostGraph, blocks: int, number: Numbered, renamed: Renamed) -> CostGraph:
    """Return the graph of a model with ``blocks`` blocks, made from the graph of a model with fewer.

    The result is likely to be right, not certain: a graph does not say which weights are read again in each block. A
    second graph with one block more shows whether it is right.

    Args:
        graph: of the model with fewer blocks.
        number: the number of the block that a parameter is part of.
        renamed: the FQN of the same parameter of another block.

    Raises:
        BlocksDifferError: no block equals the block that follows it.
        ValueError: the graph has more blocks than ``blocks``.
    """
    marks = _marks(graph, number)
    here, more = len(marks), blocks - len(marks)
    if more < 0:
        raise ValueError(f"blocks: expected {here} or more, found {blocks}")
    if not more:
        return graph
    source = _repeated_piece(graph, [step for _, step in marks])
    (_, begin), (_, end) = marks[source : source + 2]
    piece = _Piece(begin, end, graph.live_bytes_at_slot[end] - graph.live_bytes_at_slot[begin], more)
    ascends = marks[0][0] == 0

    def of_block(fqn: str, place: int) -> list[tuple[str, int]]:
        """Return FQN and step of a member and its copies, where the blocks that follow in this graph move on."""
        block = number(fqn)
        if block is None:
            return [(fqn, piece.moved(place))]
        nth = block if ascends else here - 1 - block
        copies = range(more + 1) if nth == source else [0 if nth < source else more]
        places = [place + (more if place == len(graph.seconds) else copy) * piece.steps for copy in copies]
        numbers = [nth + copy if ascends else blocks - 1 - nth - copy for copy in copies]
        return [(renamed(fqn, block), place) for block, place in zip(numbers, places, strict=True)]

    gathers: list[Gather] = []
    for gather in graph.gathers:
        last_uses = of_block(gather.fqn, gather.last_use_slot)
        for (fqn, first_use), (_, last_use) in zip(of_block(gather.fqn, gather.first_use_slot), last_uses, strict=True):
            gathers.append(gather._replace(fqn=fqn, first_use_slot=first_use, last_use_slot=last_use))
    reductions: list[Reduction] = []
    for reduction in graph.reductions:
        for fqn, slot in of_block(reduction.fqn, reduction.ready_slot):
            reductions.append(reduction._replace(fqn=fqn, ready_slot=slot))
    return CostGraph(
        piece.inserted(graph.seconds),
        tuple(map(int, piece.inserted(graph.live_bytes_in_step, piece.growth))),
        tuple(map(int, piece.inserted(graph.live_bytes_at_slot, piece.growth))),
        tuple(sorted(gathers, key=lambda gather: gather.first_use_slot)),
        tuple(sorted(reductions, key=lambda reduction: reduction.ready_slot)),
        piece.inserted(graph.contention) if graph.contention else (),
        tuple(map(piece.moved, graph.exchanges)),
    )


class _Piece(NamedTuple):
    """A piece of a graph that is repeated."""

    begin: int
    end: int
    """Numbers of the first step and of the step behind the last."""
    growth: int
    """Bytes in use at the end of the piece and not at its beginning."""
    times: int

    @property
    def steps(self) -> int:
        return self.end - self.begin

    def moved(self, place: int) -> int:
        """Return the new place of a step, or of the slot before it, that belongs to no block."""
        if self.begin < place < self.end:
            raise BlocksDifferError("a weight that is no block's own is used, or its gradient complete, within a block")
        return place if place <= self.begin else place + self.times * self.steps

    def inserted(self, values: Sequence[float], growth: int = 0) -> tuple[float, ...]:
        """Return the values of the longer graph, each copy of the piece ``growth`` more than the copy before."""
        before = self.times * max(0, -growth)
        found = [value + before for value in values[: self.end]]
        for copy in range(1, self.times + 1):
            found += [value + before + copy * growth for value in values[self.begin : self.end]]
        return tuple(found + [value + before + self.times * growth for value in values[self.end :]])


def _marks(graph: CostGraph, number: Numbered) -> list[tuple[int, int]]:
    """Return, for each block in the order of running, its number and a step that is at the same place in all blocks."""
    found: dict[int, int] = {}
    reduced = [(number(member.fqn), member.ready_slot) for member in graph.reductions]
    places = reduced or [(number(member.fqn), member.first_use_slot) for member in graph.gathers]
    for block, place in places:
        if block is not None:
            found[block] = min(place, found.get(block, place))
    marks = sorted(found.items(), key=lambda mark: mark[1])
    numbers = [block for block, _ in marks]
    if numbers not in (sorted(numbers), sorted(numbers, reverse=True)) or sorted(numbers) != list(range(len(numbers))):
        raise BlocksDifferError(f"blocks run in the order {numbers}")
    return marks


def _repeated_piece(graph: CostGraph, marks: Sequence[int]) -> int:
    """Return the number of the piece behind the first piece that equals the piece that follows it."""
    pieces = [_of_piece(graph, begin, end) for begin, end in pairwise(marks)]
    for i, (one, other) in enumerate(pairwise(pieces[1:]), 1):
        if one == other:
            return i
    raise BlocksDifferError(f"of {len(marks)} blocks none is like the one that follows it, in compute and memory")


def _of_piece(graph: CostGraph, begin: int, end: int) -> tuple[Any, ...]:
    """The costs of a piece, to compare neighbouring blocks by."""
    bytes_before = graph.live_bytes_at_slot[begin]
    memory = [
        nbytes - bytes_before
        for of in (graph.live_bytes_in_step[begin:end], graph.live_bytes_at_slot[begin : end + 1])
        for nbytes in of
    ]
    members = [
        (member.kind, member.nbytes, place - begin)
        for places in (
            [(g, g.first_use_slot) for g in graph.gathers],
            [(g, g.last_use_slot) for g in graph.gathers],
            [(r, r.ready_slot) for r in graph.reductions],
        )
        for member, place in places
        if begin <= place < end
    ]
    return graph.seconds[begin:end], memory, members

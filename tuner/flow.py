"""Control flow of machine code: the innermost loops that hold a matrix instruction, whatever the instruction set."""

from collections.abc import Callable
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction; target is the index it may jump to, falls is false if the next one cannot follow."""

    op: str
    args: str
    target: int | None = None
    falls: bool = True


def _blocks(code: list[Instruction]) -> tuple[list[range], list[list[int]]]:
    """Basic blocks as instruction ranges, and the successors of each."""
    starts = {0} | {i.target for i in code if i.target is not None}
    starts |= {n + 1 for n, i in enumerate(code) if i.target is not None or not i.falls}
    edges = sorted(start for start in starts if start < len(code))
    blocks = [range(a, b) for a, b in zip(edges, [*edges[1:], len(code)], strict=True)]
    index = {block.start: n for n, block in enumerate(blocks)}
    successors = []
    for block in blocks:
        last = code[block[-1]]
        after = [block.stop] if last.falls else []
        successors.append([index[i] for i in (*after, last.target) if i in index])
    return blocks, successors


def _entries(successors: list[list[int]]) -> list[int]:
    """Blocks where execution may begin: the first, and those that only a jump through a register can reach.

    A warp-specialised kernel enters each partition so. What no jump names comes first, then what is left in order.
    """
    named = {after for nexts in successors for after in nexts}
    entries: list[int] = []
    reached: set[int] = set()
    for block in [0, *(b for b in range(len(successors)) if b not in named), *range(len(successors))]:
        if block not in reached:
            entries.append(block)
            pending = [block]
            while pending:
                if (at := pending.pop()) not in reached:
                    reached.add(at)
                    pending += successors[at]
    return entries


def _dominators(successors: list[list[int]]) -> list[int]:
    """For each block the bit set of blocks that every path to it from an entry passes."""
    n = len(successors)
    everything = (1 << n) - 1
    predecessors: list[list[int]] = [[] for _ in range(n)]
    for block, nexts in enumerate(successors):
        for after in nexts:
            predecessors[after].append(block)
    entries = set(_entries(successors))
    dominators = [1 << block if block in entries else everything for block in range(n)]
    changed = True
    while changed:
        changed = False
        for block in (b for b in range(n) if b not in entries):
            common = everything
            for before in predecessors[block]:
                common &= dominators[before]
            common |= 1 << block
            changed |= common != dominators[block]
            dominators[block] = common
    return dominators


def _natural_loops(successors: list[list[int]], dominators: list[int]) -> dict[int, set[int]]:
    """Blocks of each loop by its header; back edges to one header make one loop.

    Dominance and not mere backward jumps: SASS moves the waiting loops of barriers behind the code and jumps back.
    """
    loops: dict[int, set[int]] = {}
    for tail, nexts in enumerate(successors):
        for header in nexts:
            if dominators[tail] >> header & 1:
                loops.setdefault(header, {header}).update(_reaching(tail, header, successors))
    return loops


def _without_waits(header: int, loops: dict[int, set[int]], holds: set[int], successors, dominators) -> set[int]:
    """A loop without the loops beside its path: a trip that finds its barrier open passes them by."""
    loop = loops[header]
    tails = [block for block in loop if header in successors[block]]
    beside = [
        h for h, other in loops.items()
        if other < loop and not other & holds and not all(dominators[tail] >> h & 1 for tail in tails)
    ]  # fmt: skip
    return {block for block in loop if not any(dominators[block] >> h & 1 for h in beside)}


def _reaching(tail: int, header: int, successors: list[list[int]]) -> set[int]:
    """Blocks from which tail is reached without passing header."""
    found, pending = {header, tail}, [tail]
    while pending:
        block = pending.pop()
        if block == header:
            continue
        before = [b for b, nexts in enumerate(successors) if block in nexts and b not in found]
        found.update(before)
        pending.extend(before)
    return found


def matrix_loops(code: list[Instruction], is_matrix: Callable[[str], bool]) -> list[list[Instruction]]:
    """Instructions of each innermost loop among those that hold a matrix instruction, in the order of the code.

    Without what spins beside the path of a trip until a barrier opens.
    """
    if not code:
        return []
    blocks, successors = _blocks(code)
    dominators = _dominators(successors)
    holds = {n for n, block in enumerate(blocks) if any(is_matrix(code[i].op) for i in block)}
    every = _natural_loops(successors, dominators)
    loops = {header: loop for header, loop in every.items() if loop & holds}
    innermost = [header for header, loop in loops.items() if not any(other < loop for other in loops.values())]
    trips = [_without_waits(header, every, holds, successors, dominators) for header in innermost]
    return [[code[i] for n in sorted(trip) for i in blocks[n]] for trip in sorted(trips, key=min)]

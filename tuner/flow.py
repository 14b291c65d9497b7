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


def _dominators(successors: list[list[int]]) -> list[int]:
    """For each block the bit set of blocks that every path to it passes; blocks without a path keep all bits."""
    n = len(successors)
    everything = (1 << n) - 1
    predecessors: list[list[int]] = [[] for _ in range(n)]
    for block, nexts in enumerate(successors):
        for after in nexts:
            predecessors[after].append(block)
    dominators = [1] + [everything] * (n - 1)
    changed = True
    while changed:
        changed = False
        for block in range(1, n):
            common = everything
            for before in predecessors[block]:
                common &= dominators[before]
            common |= 1 << block
            changed |= common != dominators[block]
            dominators[block] = common
    return dominators


def _natural_loops(successors: list[list[int]]) -> list[set[int]]:
    """Blocks of each loop; back edges to one header make one loop.

    Dominance and not mere backward jumps: SASS moves the waiting loops of barriers behind the code and jumps back.
    """
    dominators = _dominators(successors)
    loops: dict[int, set[int]] = {}
    for tail, nexts in enumerate(successors):
        for header in nexts:
            if dominators[tail] >> header & 1:
                loops.setdefault(header, {header}).update(_reaching(tail, header, successors))
    return list(loops.values())


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
    """Instructions of each innermost loop among those that hold a matrix instruction, in the order of the code."""
    if not code:
        return []
    blocks, successors = _blocks(code)
    holds = {n for n, block in enumerate(blocks) if any(is_matrix(code[i].op) for i in block)}
    loops = [loop for loop in _natural_loops(successors) if loop & holds]
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    return [[code[i] for n in sorted(loop) for i in blocks[n]] for loop in sorted(innermost, key=min)]

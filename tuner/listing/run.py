"""Runs a kernel's listing: programs one after another, the waves of a program in turns from barrier to barrier."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import crosslane, division, local, memory, mfma, salu, valu
from .memory import Memory
from .operands import Step
from .parse import Instruction, Listing, ListingError, UnknownInstruction, parse
from .state import LANES, POISON, Lds, Wave

BUILDERS: dict[str, Callable[[Instruction, dict, dict[str, int]], Step]] = {
    name: builder
    for module in (salu, valu, division, crosslane, mfma, local, memory)
    for name, builder in module.BUILDERS.items()
}
MAX_STEPS = 5_000_000  # of one wave between two barriers: a corrupted loop must end
# What a kernel descriptor must say for the models to hold: fp32 rounds to nearest even and keeps denormals.
_REQUIRED = {"float_round_mode_32": 0, "float_denorm_mode_32": 3}


def decode(ins: Instruction, labels: dict[str, int]) -> Step:
    """The function that executes an instruction; raises UnknownInstruction for an opcode or modifier without model."""
    if ins.op not in BUILDERS:
        raise UnknownInstruction(f"line {ins.number}: no model of opcode {ins.op}: `{ins.text}`")
    modifiers = dict(ins.modifiers)
    try:
        step = BUILDERS[ins.op](ins, modifiers, labels)
    except (ValueError, IndexError, KeyError) as error:
        raise UnknownInstruction(f"line {ins.number}: cannot read `{ins.text}` ({error})") from error
    if modifiers:
        raise UnknownInstruction(f"line {ins.number}: no model of {', '.join(modifiers)} in `{ins.text}`")
    return step


class Program:
    """A decoded listing; run() executes one workgroup."""

    def __init__(self, listing: Listing):
        self.listing = listing
        for name, value in _REQUIRED.items():
            if listing.descriptor.get(name) != value:
                raise UnknownInstruction(f"kernel {listing.name}: .amdhsa_{name} is not {value}")
        self.steps = [decode(ins, listing.labels) for ins in listing.instructions]

    def _start(self, wave: Wave, number: int, threads: int, kernarg: int, group: Sequence[int]) -> None:
        """Registers as the dispatcher leaves them: argument pointer, preloaded arguments, workgroup and work item.

        Their order is that of LLVM's "User Guide for AMDGPU Backend", initial kernel execution state. The pointers to
        the dispatch packet and the queue stay unwritten.
        """
        descriptor = self.listing.descriptor
        if not descriptor.get("user_sgpr_kernarg_segment_ptr"):
            raise UnknownInstruction(f"kernel {self.listing.name} without a pointer to its arguments")
        at = 2 * sum(descriptor.get(f"user_sgpr_{name}", 0) for name in ("dispatch_ptr", "queue_ptr"))
        wave.set_scalar64(at, kernarg)
        at += 2 + 2 * descriptor.get("user_sgpr_dispatch_id", 0) + descriptor.get("user_sgpr_private_segment_size", 0)
        preload = descriptor.get("user_sgpr_kernarg_preload_length", 0)
        if at + preload != descriptor["user_sgpr_count"]:
            raise UnknownInstruction(f"kernel {self.listing.name}: user registers of an unknown kind")
        if preload:
            first = descriptor.get("user_sgpr_kernarg_preload_offset", 0)
            wave.s[at : at + preload] = wave.memory.read_scalar(kernarg + 4 * first, preload)
        n = descriptor["user_sgpr_count"]
        for axis, index in zip("xyz", group, strict=True):
            if descriptor.get(f"system_sgpr_workgroup_id_{axis}"):
                wave.s[n] = index
                n += 1
        wave.u[0] = np.arange(LANES) + number * LANES
        wave.set_exec(sum(1 << n for n in range(LANES) if number * LANES + n < threads))

    def run(
        self, kernarg: int, group: Sequence[int], threads: int, lds_bytes: int, memory: Memory,
        late: bool, backwards: bool,
    ) -> None:  # fmt: skip
        """One workgroup to its end; see run_kernel."""
        lds, scratch = Lds(lds_bytes), self.listing.descriptor["private_segment_fixed_size"] // 4
        waves = [Wave(lds, memory, late, scratch) for _ in range(-(-threads // LANES))]
        for number, wave in enumerate(waves):
            self._start(wave, number, threads, kernarg, group)
        if backwards:
            waves.reverse()
        while waves:
            waves = [wave for wave in waves if self._advance(wave) == salu.BARRIER]

    def _advance(self, wave: Wave) -> int:
        """Runs a wave to its next barrier or its end; says which."""
        steps, pc = self.steps, wave.pc
        try:
            for _ in range(MAX_STEPS):
                target = steps[pc](wave)
                pc += 1
                if target is not None:
                    if target < 0:
                        wave.pc = pc
                        return target
                    pc = target
        except ListingError as error:
            raise type(error)(f"{self._where(pc)}: {error}") from error
        except (TypeError, IndexError, ValueError) as error:  # an unwritten scalar register is None
            raise ListingError(f"{self._where(pc)}: {type(error).__name__}: {error}") from error
        raise ListingError(f"{self._where(pc)}: no end after {MAX_STEPS} instructions")

    def _where(self, pc: int) -> str:
        if pc >= len(self.steps):
            return f"{self.listing.name} runs past its end"
        ins = self.listing.instructions[pc]
        return f"{self.listing.name} line {ins.number} `{ins.text}`"


def _argument(value: Any, size: int, pointer: bool, memory: Memory) -> bytes:
    """The bytes of one kernel argument."""
    if value is None:
        return bytes(size) if pointer else POISON.to_bytes(4, "little") * (size // 4)
    if isinstance(value, np.ndarray):
        if not pointer:
            raise TypeError("an array was given for an argument that is no pointer")
        if not value.flags.c_contiguous:
            raise ValueError("a buffer must be contiguous")
        address = memory.place(value.reshape(-1).view(np.uint8), value.ctypes.data)
        return address.to_bytes(8, "little")
    if pointer:
        raise TypeError(f"{value!r} was given for a pointer argument")
    if isinstance(value, float):
        return np.array(value, np.float32 if size == 4 else np.float64).tobytes()
    return (operator.index(value) & (1 << 8 * size) - 1).to_bytes(size, "little")


def pack_arguments(listing: Listing, args: Sequence, memory: Memory) -> np.ndarray:
    """The argument segment, uint8. Pointers left out at the end, as Triton's to scratch memory are, become null.

    What else is not given is poison, so that a kernel that reads the runtime's hidden arguments fails.
    """
    layout = listing.arguments
    if len(args) > len(layout):
        raise TypeError(f"{listing.name} takes {len(layout)} arguments, {len(args)} were given")
    end = max((a.offset + a.size for a in layout), default=0)
    segment = np.full(-(-end // 64) * 16 + 1024, POISON, np.uint32).view(np.uint8)  # with the hidden ones behind
    for value, (offset, size, pointer) in itertools.zip_longest(args, layout):
        segment[offset : offset + size] = np.frombuffer(_argument(value, size, pointer, memory), np.uint8)
    return segment


def run_kernel(
    text: str, args: Sequence, grid: Sequence[int], *, num_warps: int, lds_bytes: int,
    late: bool = False, backwards: bool = False,
) -> None:  # fmt: skip
    """Execute a gfx950 listing on every program of a grid; buffers among the arguments are changed in place.

    text: `CompiledKernel.asm["amdgcn"]` of a kernel compiled for gfx950. args: what the kernel takes, in the order of
    its metadata: C-contiguous numpy arrays of any dtype for pointers (their bytes are what counts; arrays may share
    memory), ints, floats, None for a null pointer. grid: one to three program counts. num_warps, lds_bytes: waves and
    LDS bytes of a program, `metadata.num_warps` and `metadata.shared`. late: memory instructions finish as late as
    s_waitcnt allows instead of at once, which shows a missing wait. backwards: within a program the last wave runs
    first, which shows some missing barriers. A correct listing gives the same bits all four ways.

    Raises UnknownInstruction, naming the opcode or modifier, for what is not modelled, before anything runs where it
    can be seen in the text; ListingError for an access outside of a buffer or of LDS, a scalar register that was never
    written, or a kernel without end; TypeError for arguments that do not fit the metadata.
    """
    program = Program(parse(text))
    memory = Memory()
    kernarg = memory.place(pack_arguments(program.listing, args, memory))
    x, y, z = (*grid, 1, 1)[:3]
    with np.errstate(all="ignore"):
        for group in np.ndindex(z, y, x):
            program.run(kernarg, group[::-1], num_warps * LANES, lds_bytes, memory, late, backwards)

"""What a running kernel can change: registers of a wave, LDS of a workgroup.

One wave has 64 lanes. VGPR i is row i of a (512, 64) array, AGPR i row 256 + i, as in the unified register file of
CDNA3; scalar registers are Python integers, None before they are written.
"""

from collections.abc import Callable

import numpy as np

from .parse import ListingError

LANES = 64
VCC, M0, EXEC = 106, 124, 126  # scalar register numbers
ALL_LANES = 2**64 - 1
# NaN as fp32, as each BF16 half and as each of the four E4M3 bytes, and an offset behind every tensor: what has not
# been written poisons the result instead of looking like a zero.
POISON = 0x7FFF7FFF
# A counter of 6 or 4 bits holds the next instruction back when it is full, which compiled code relies on.
IN_FLIGHT = {"vmcnt": 63, "lgkmcnt": 15}
FP16_OVFL = 1 << 23  # bit of the MODE register: conversions to FP8 saturate


def bits_of(mask: np.ndarray) -> int:
    """The 64-bit scalar of a boolean lane mask."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def mask_of(bits: int) -> np.ndarray:
    """The boolean lane mask of a 64-bit scalar."""
    packed = np.frombuffer(bits.to_bytes(8, "little"), np.uint8)
    return np.unpackbits(packed, bitorder="little").view(bool)


class Lds:
    """The local memory of one workgroup, poisoned at first. Addresses are byte offsets of active lanes, uint32."""

    def __init__(self, size: int):
        self.words = np.full(-(-size // 4), POISON, np.uint32)
        self.bytes = self.words.view(np.uint8)
        self.size = size

    def _check(self, address: np.ndarray, count: int, alignment: int) -> np.ndarray:
        address = address.astype(np.int64)
        if address.size and int(address.max()) + count > self.size:
            raise ListingError(f"LDS access at byte {int(address.max())} of {self.size}")
        if (address & (alignment - 1)).any():
            raise ListingError(f"LDS access of {count} bytes at an address that is no multiple of {alignment}")
        return address

    def read(self, address: np.ndarray, words: int) -> np.ndarray:
        """uint32 (words, lanes)."""
        first = self._check(address, 4 * words, 4) >> 2
        return self.words[first + np.arange(words)[:, None]]

    def write(self, address: np.ndarray, value: np.ndarray) -> None:
        """value: uint32 (words, lanes); a later lane wins over an earlier one."""
        first = self._check(address, 4 * len(value), 4) >> 2
        self.words[first + np.arange(len(value))[:, None]] = value

    def read_small(self, address: np.ndarray, count: int) -> np.ndarray:
        """One or two bytes of each lane, zero-extended to uint32."""
        first = self._check(address, count, count)
        return sum(self.bytes[first + n].astype(np.uint32) << np.uint32(8 * n) for n in range(count))

    def write_small(self, address: np.ndarray, value: np.ndarray, count: int) -> None:
        first = self._check(address, count, count)
        for n in range(count):
            self.bytes[first + n] = (value >> np.uint32(8 * n)) & np.uint32(0xFF)


class Wave:
    """The state of one wave; u, f and i are the vector registers as uint32, fp32 and int32.

    late: memory instructions finish when a s_waitcnt demands it, and not, as otherwise, at once. scratch: words of the
    private memory of a lane.
    """

    def __init__(self, lds: Lds, memory, late: bool = False, scratch: int = 0):
        self.u = np.full((512, LANES), POISON, np.uint32)
        self.f = self.u.view(np.float32)
        self.i = self.u.view(np.int32)
        self.s: list = [None] * 128
        self.scc = 0
        self.mode = 0
        self.pc = 0
        self.lds = lds
        self.memory = memory
        self.scratch = np.full((scratch, LANES), POISON, np.uint32)
        self._late = late
        self._unfinished: dict[str, list[Callable[[], None]]] = {counter: [] for counter in IN_FLIGHT}
        self.set_exec(ALL_LANES)

    def finish(self, counter: str, action: Callable[[], None]) -> None:
        """Do the rest of a memory instruction, now or when the counter is waited for."""
        if not self._late:
            action()
            return
        self._unfinished[counter].append(action)
        self.wait(counter, IN_FLIGHT[counter])

    def wait(self, counter: str, left: int = 0) -> None:
        """Until at most `left` instructions of the counter are unfinished; they finish in order."""
        queue = self._unfinished[counter]
        while len(queue) > left:
            queue.pop(0)()

    def set_exec(self, bits: int) -> None:
        self.s[EXEC], self.s[EXEC + 1] = bits & 0xFFFFFFFF, bits >> 32
        self.full = bits == ALL_LANES
        self.mask = mask_of(bits)

    def scalar64(self, register: int) -> int:
        return self.s[register] | self.s[register + 1] << 32

    def set_scalar64(self, register: int, value: int) -> None:
        if register == EXEC:
            self.set_exec(value)
        else:
            self.s[register], self.s[register + 1] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF

    def set_scalar(self, register: int, value: int) -> None:
        self.s[register] = value
        if register >= EXEC:
            self.set_exec(self.scalar64(EXEC))

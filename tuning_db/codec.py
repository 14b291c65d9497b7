"""How values become columns: numbers, moments, and the two that are packed, samples and facts. Standard library only.

The two were three quarters of a file: 30 timings of a trial take 160 bytes as JSON and 35 as differences, the facts of
a compiled kernel 730 as JSON and 110 deflated against a text that is like them. `zyfa-db export` prints both in full.
"""

import json
import math
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal

from zyfa.errors import DatabaseError

SAMPLE_DIGITS = 4  # significant; timing noise is 0.1 % at best
MAX_FACTS_BYTES = 1 << 16  # a compiled kernel has about 1 KB; bounds what a packed stranger may become

# What facts look like. A released text never changes: files are unpacked with it.
_LIKE_FACTS = (
    b'{"agprs":0,"arch":"sm90","code_bytes":58240,"code_hash":"","lds_bytes":98304,"loops":[{"lds_read_bytes":25472,'
    b'"lds_write_bytes":0,"mix":{"HGMMA.64x128x16.F32.BF16":8,"HGMMA.64x64x16.F32.BF16":16,"QGMMA.64x64x32.F32.E4M3.E4M3'
    b'":8,"barrier":2,"cvt":32,"ds_read":7,"salu":69,"scratch":68,"trans":68,"valu":272,"valu_half":169,"vmem":2,'
    b'"vmem_lds":16,"waitcnt":6,"xlane":16}}],"registers":255,"scratch_bytes":0,"spills":0,"waves_per_simd":2.0,'
    b'"workgroups_per_unit":2}'
    b'{"agprs":20,"arch":"gfx950","code_bytes":13692,"code_hash":"","lds_bytes":16384,"loops":[{"lds_read_bytes":16384,'
    b'"lds_write_bytes":4096,"mix":{"barrier":2,"cvt":48,"ds_read":8,"ds_tr":16,"ds_write":4,"nop":15,"pk":32,'
    b'"salu":15,"trans":34,"v_mfma_f32_32x32x64_f8f6f4":4,"v_mfma_i32_32x32x32_i8":8,"valu":115,"vmem":6,'
    b'"waitcnt":13,"xlane":6}},{"lds_read_bytes":32768,"lds_write_bytes":8192,"mix":{"barrier":2,"cvt":16,'
    b'"ds_read":16,"ds_tr":32,"ds_write":8,"nop":9,"pk":32,"salu":8,"trans":33,"v_mfma_f32_32x32x16_bf16":32,'
    b'"valu":217,"vmem":8,"waitcnt":21,"xlane":2}}],"registers":276,"scratch_bytes":0,"spills":0,'
    b'"waves_per_simd":1.0,"workgroups_per_unit":1}'
)


def finite(name: str, value) -> float | None:
    """A finite Python float (NumPy's float32 would be bound as a BLOB, NaN as NULL); None stays None."""
    if value is None:
        return None
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be finite")
    return float(value)


def utc(seconds: float) -> str:
    """Unix time as text like 2026-11-30T08:23:11.042Z, which sorts by time."""
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def pack_samples(samples_us: Sequence[float]) -> bytes:
    """Microseconds, rounded to SAMPLE_DIGITS, as a decimal exponent and the differences of whole numbers."""
    exact = [Decimal(f"{us:.{SAMPLE_DIGITS}g}").normalize() for us in samples_us]
    if not exact:
        return b""
    exponent = min(int(number.as_tuple().exponent) for number in exact)
    out, before = bytearray([exponent & 0xFF]), 0
    for number in exact:
        units = int(number.scaleb(-exponent))
        _put(out, units - before)
        before = units
    return bytes(out)


def unpack_samples(packed: bytes) -> tuple[float, ...]:
    """Inverse of pack_samples, in microseconds; raises DatabaseError for bytes that it cannot have written."""
    if not packed:
        return ()
    exponent = packed[0] - 256 if packed[0] > 127 else packed[0]
    samples, units, value, shift = [], 0, 0, 0
    for byte in packed[1:]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            units += value >> 1 if not value & 1 else -(value >> 1) - 1
            samples.append(float(f"{units}e{exponent}"))
            value = shift = 0
        elif shift > 63:
            raise DatabaseError("samples hold a number of more than 63 bits")
    if shift:
        raise DatabaseError("samples end within a number")
    return tuple(samples)


def _put(out: bytearray, number: int) -> None:
    """Appends a signed number, seven bits a byte, the sign in the lowest bit."""
    value = number << 1 if number >= 0 else (-number << 1) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def pack_facts(facts: dict) -> bytes:
    """A dict of JSON values; raises ValueError for NaN and infinity."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=_LIKE_FACTS)
    return deflate.compress(text) + deflate.flush()


def unpack_facts(packed: bytes) -> dict:
    """Inverse of pack_facts; raises DatabaseError for anything else, and for more than MAX_FACTS_BYTES."""
    inflate = zlib.decompressobj(-15, zdict=_LIKE_FACTS)
    try:
        text = inflate.decompress(packed, MAX_FACTS_BYTES)
        facts = json.loads(text) if inflate.eof else None
    except (zlib.error, ValueError, RecursionError) as error:
        raise DatabaseError(f"facts cannot be unpacked: {error}") from error
    if not isinstance(facts, dict):
        raise DatabaseError("facts are cut, too long, or no object")
    return facts

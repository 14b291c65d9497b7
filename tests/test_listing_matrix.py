"""Matrix instructions and LDS of the listing's interpreter, against numpy."""

import numpy as np
import pytest
import torch
from listing_machine import LANE, execute

from zyfa.tuner.listing import ListingError, UnknownInstruction
from zyfa.tuner.listing.floats import E4M3, E5M2
from zyfa.tuner.listing.state import POISON

RNG = np.random.default_rng(0)
TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.float8_e4m3fn, "bf8": torch.float8_e5m2,
         "i8": torch.int8}  # fmt: skip


@pytest.mark.parametrize("table, dtype", [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_every_fp8_code_is_what_torch_reads(table, dtype):
    want = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).double().numpy()
    assert np.array_equal(table, want, equal_nan=True)


# --- MFMA ------------------------------------------------------------------------------------------------------------

SHAPES = [
    ("v_mfma_f32_32x32x16_bf16", "bf16", ""),
    ("v_mfma_f32_16x16x32_bf16", "bf16", ""),
    ("v_mfma_f32_32x32x16_f16", "f16", ""),
    ("v_mfma_f32_32x32x8_bf16", "bf16", ""),
    ("v_mfma_f32_16x16x16_bf16", "bf16", ""),
    ("v_mfma_f32_32x32x64_f8f6f4", "fp8", ""),
    ("v_mfma_f32_16x16x128_f8f6f4", "fp8", ""),
    ("v_mfma_f32_16x16x128_f8f6f4", "bf8", " cbsz:1 blgp:1"),
    ("v_mfma_f32_32x32x16_fp8_fp8", "fp8", ""),
    ("v_mfma_f32_16x16x32_fp8_fp8", "fp8", ""),
    ("v_mfma_i32_32x32x32_i8", "i8", ""),
    ("v_mfma_i32_16x16x64_i8", "i8", ""),
    ("v_mfma_i32_32x32x16_i8", "i8", ""),
]


def random_matrix(rows: int, k: int, kind: str) -> torch.Tensor:
    if kind == "i8":
        return torch.from_numpy(RNG.integers(-128, 128, (rows, k), dtype=np.int8))
    return torch.from_numpy(RNG.normal(size=(rows, k))).to(TORCH[kind])


def as_operand(m: torch.Tensor, pieces: int = 1) -> np.ndarray:
    """(registers, 64): lane l holds row l % rows, and of each of the pieces of k the (l // rows)-th part."""
    rows = len(m)
    raw = m.view(torch.uint8).numpy().reshape(rows, pieces, 64 // rows, -1)  # bytes of each part of a row
    return raw.transpose(2, 0, 1, 3).reshape(64, -1).copy().view(np.uint32).T


def as_result(d: np.ndarray) -> np.ndarray:
    """(registers, 64), written element by element from the ISA's description of the output."""
    rows = len(d)
    out = np.zeros((rows * rows // 64, 64), d.dtype)
    for register in range(len(out)):
        for lane in range(64):
            tall = 8 * (register // 4) + 4 * (lane // 32) + register % 4
            row = tall if rows == 32 else 4 * (lane // 16) + register
            out[register, lane] = d[row, lane % rows]
    return out


@pytest.mark.parametrize("op, kind, modifiers", SHAPES)
@pytest.mark.parametrize("addend", ["registers", "zero"])
def test_mfma_is_a_matrix_product(op, kind, modifiers, addend):
    bank, shape = op.split("_")[2:4]
    rows, _, k = (int(n) for n in shape.split("x"))
    a, b = random_matrix(rows, k, kind), random_matrix(rows, k, kind)
    dtype = np.float32 if bank == "f32" else np.int32
    c = (RNG.normal(size=(rows, rows)) * 100).astype(dtype)
    regs_a, regs_b, regs_c = as_operand(a), as_operand(b), as_result(c).view(np.uint32)
    n, m = len(regs_a), len(regs_c)
    v = {i: row for start, regs in ((0, regs_a), (16, regs_b), (32, regs_c)) for i, row in enumerate(regs, start)}
    third = f"v[32:{31 + m}]" if addend == "registers" else "0"
    w = execute(f"{op} a[0:{m - 1}], v[0:{n - 1}], v[16:{15 + n}], {third}{modifiers}", v=v)
    exact = a.double().numpy() @ b.double().numpy().T + (c if addend == "registers" else 0)
    want = as_result(exact.astype(dtype))
    got = w.u[256 : 256 + m].view(dtype)
    if bank == "i32":
        assert np.array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=2**-23, atol=1e-13)  # one rounding each, sums in another order


@pytest.mark.parametrize("shape", ["32x32x64", "16x16x128"])
def test_scaled_mfma_scales_32_values_of_a_row(shape):
    rows, _, k = (int(n) for n in shape.split("x"))
    a, b = random_matrix(rows, k, "fp8"), random_matrix(rows, k, "fp8")
    codes = RNG.integers(100, 150, (2, rows, k // 32))
    packed = [c.T.reshape(64) << 8 * byte for c, byte in zip(codes, (3, 1), strict=True)]  # the byte of each lane
    v = dict(enumerate(as_operand(a, 2))) | dict(enumerate(as_operand(b, 2), 16)) | {32: packed[0], 33: packed[1]}
    text = f"v_mfma_scale_f32_{shape}_f8f6f4 a[0:{rows * rows // 64 - 1}], v[0:7], v[16:23], 0, v32, v33"
    w = execute(f"{text} op_sel:[1,1,0] op_sel_hi:[1,0,0]", v=v)
    left, right = (m.double().numpy() * 2.0 ** (c - 127).repeat(32, 1) for m, c in zip((a, b), codes, strict=True))
    want = as_result((left @ right.T).astype(np.float32))
    np.testing.assert_allclose(w.f[256 : 256 + len(want)], want, rtol=2**-23, atol=1e-30)


def test_mfma_accumulates_in_place_whatever_exec_is():
    w = execute("v_mfma_f32_32x32x16_bf16 v[8:23], v[0:3], v[4:7], v[8:23]",
                v={n: 0x3F803F80 for n in range(8)} | {n: 5.0 for n in range(8, 24)}, exec_bits=1)  # fmt: skip
    assert (w.f[8:24] == 21.0).all()


@pytest.mark.parametrize(
    "text, named",
    [
        ("v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], 0 cbsz:4 blgp:4", "cbsz:4"),
        ("v_mfma_f32_32x32x16_bf16 v[0:15], v[16:17], v[24:27], 0", r"v\[16:17\]"),
        ("v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[24:27], 0 neg:[1,0,0]", "neg"),
        ("v_mfma_scale_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], 0", "4 operands"),
    ],
)
def test_mfma_forms_without_a_model_are_named(text, named):
    with pytest.raises(UnknownInstruction, match=named):
        execute(text)


# --- LDS -------------------------------------------------------------------------------------------------------------

BYTES = np.arange(2048, dtype=np.uint32).view(np.uint8)  # word n holds n


def test_reads_of_all_widths():
    w = execute("ds_read_b128 v[4:7], v0 offset:64", "ds_read2_b32 v[8:9], v1 offset0:3 offset1:5",
                "ds_read2st64_b64 v[12:15], v1 offset1:2", "ds_read_u8 v16, v2", "ds_read_u16_d16_hi v17, v1 offset:4",
                v={0: 16 * LANE, 1: 4 * LANE, 2: LANE, 17: 0xAAAABBBB}, lds=BYTES)  # fmt: skip
    for n in range(4):
        assert np.array_equal(w.u[4 + n], 4 * LANE + 16 + n)
    assert np.array_equal(w.u[8], LANE + 3) and np.array_equal(w.u[9], LANE + 5)
    assert np.array_equal(w.u[12:16], [LANE, LANE + 1, LANE + 256, LANE + 257])
    assert np.array_equal(w.u[16], BYTES[:64]) and np.array_equal(w.u[17], (LANE + 1) << 16 | 0xBBBB)


def test_writes_of_all_widths():
    w = execute(
        "ds_write_b128 v0, v[4:7]",
        "ds_write2st64_b32 v1, v4, v5 offset0:4 offset1:5",
        "ds_write_b16_d16_hi v2, v8 offset:1536",
        "ds_write_b8 v3, v8 offset:1700",
        v={0: 16 * LANE, 1: 4 * LANE, 2: 2 * LANE, 3: LANE, 4: LANE, 5: LANE + 64, 6: 7, 7: 8, 8: 0x12345678},
    )
    words = w.lds.words
    assert np.array_equal(words[:256].reshape(64, 4).T, np.stack([LANE, LANE + 64, LANE * 0 + 7, LANE * 0 + 8]))
    assert np.array_equal(words[256:384], np.concatenate([LANE, LANE + 64]))
    assert (w.lds.bytes[1536:1664].view(np.uint16) == 0x1234).all() and (w.lds.bytes[1700:1764] == 0x78).all()
    assert words[500] == POISON, "what nobody wrote"


def test_two_writes_at_once():
    w = execute("ds_write2_b64 v0, v[4:5], v[6:7] offset1:64", "ds_write2_b32 v1, v4, v6 offset0:255 offset1:254",
                v={0: 8 * LANE, 1: 1024, 4: LANE, 5: 1, 6: LANE + 64, 7: 2}, exec_bits=0b111)  # fmt: skip
    assert w.lds.words[:6].tolist() == [0, 1, 1, 1, 2, 1] and w.lds.words[128:134].tolist() == [64, 2, 65, 2, 66, 2]
    assert w.lds.words[256 + 254 : 256 + 256].tolist() == [66, 2], "the last lane wins"


def test_inactive_lanes_neither_read_nor_write():
    w = execute("ds_write_b32 v0, v1", "ds_read_b32 v2, v0", v={0: 4 * LANE, 1: 5, 2: 9}, lds=BYTES, exec_bits=0b10)
    assert w.lds.words[:3].tolist() == [0, 5, 2] and w.u[2, :3].tolist() == [9, 5, 9]


@pytest.mark.parametrize("bits, rows", [(16, 4), (8, 8)])
def test_transposed_reads_give_a_lane_its_column(bits, rows):
    """Four groups of 16 lanes; each reads `rows` rows of 16 elements that lie 256 bytes apart."""
    size = bits // 8
    dtype = np.uint16 if bits == 16 else np.uint8
    matrix = RNG.integers(0, 2**bits, (4, rows, 256 // size), dtype=dtype)
    pieces = 16 * size // 8  # lanes that share a row
    lane = LANE % 16
    address = (LANE // 16 * rows + lane // pieces) * 256 + lane % pieces * 8
    w = execute(
        f"ds_read_b64_tr_b{bits} v[2:3], v0 offset:8", v={0: address - 8}, lds=matrix.reshape(-1).view(np.uint8)
    )
    got = np.ascontiguousarray(w.u[2:4].T).view(dtype)
    assert np.array_equal(got, matrix[:, :, :16].transpose(0, 2, 1).reshape(64, rows))


@pytest.mark.parametrize("address, named", [(8192 - 12, "8180 of 8192"), (2, "multiple of 4")])
def test_lds_is_left_and_misread_loudly(address, named):
    with pytest.raises(ListingError, match=named):
        execute("ds_read_b128 v[4:7], v0", v={0: address})


def test_a_read_may_overwrite_its_own_address():
    w = execute("ds_read2_b64 v[0:3], v0 offset1:1", v={0: 8 * LANE}, lds=BYTES)
    assert np.array_equal(w.u[:4], [2 * LANE, 2 * LANE + 1, 2 * LANE + 2, 2 * LANE + 3])

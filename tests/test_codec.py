"""zyfa.tuning_db.codec: what is packed comes back, and a stranger's bytes cannot become large or pass for ours."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zyfa.errors import DatabaseError
from zyfa.tuning_db import codec

POSITIVE = st.floats(1e-3, 1e11, allow_nan=False)


@given(st.lists(POSITIVE, max_size=40))
def test_samples_come_back_with_four_digits(samples):
    back = codec.unpack_samples(codec.pack_samples(samples))
    assert back == tuple(float(f"{us:.4g}") for us in samples)
    assert codec.pack_samples(back) == codec.pack_samples(samples)


@given(st.binary(max_size=60))
def test_any_bytes_are_samples_or_a_database_error(packed):
    try:
        assert len(codec.unpack_samples(packed)) <= len(packed)
    except DatabaseError as error:
        assert "samples" in str(error)


def test_samples_of_a_steady_kernel_take_a_byte_each():
    assert len(codec.pack_samples([151.1, 151.0, 150.6, 152.3, 151.1])) == 1 + 2 + 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(), st.lists, max_leaves=9
)


@given(st.dictionaries(st.text(), JSON, max_size=9))
def test_facts_come_back(facts):
    assert codec.unpack_facts(codec.pack_facts(facts)) == facts


def test_facts_are_packed_against_a_like_text():
    mix = {"barrier": 2, "cvt": 16, "ds_read": 8, "pk": 32, "trans": 34, "valu": 117}
    assert len(codec.pack_facts({"loops": [{"lds_read_bytes": 16384, "mix": mix}], "registers": 225})) < 70


@pytest.mark.parametrize("packed", [b"", b"no", zlib.compress(b"[1]", 9)[2:-4], codec.pack_facts({"a": 1})[:-1]])
def test_what_is_no_facts(packed):
    with pytest.raises(DatabaseError, match="facts"):
        codec.unpack_facts(packed)


def test_a_bomb_is_not_inflated():
    with pytest.raises(DatabaseError, match="too long"):
        codec.unpack_facts(codec.pack_facts({"x": "0" * 10_000_000}))

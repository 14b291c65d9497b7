"""Texts of the command line: what each form means, and that every bad token is quoted with the accepted forms."""

import pytest

from zyfa.tuner.lengths import MAX_LENGTH, parse_duration, parse_heads, parse_numbers, parse_seq_lens

POWERS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@pytest.mark.parametrize(
    "text, lengths",
    [
        ("512..32k", POWERS),
        ("512..32K", POWERS),
        ("512..32Ki", POWERS),
        ("512..32768", POWERS),
        (" 512 .. 32k ", POWERS),
        ("512..512", (512,)),
        ("1..1", (1,)),
        ("1..3", (1, 2, 3)),
        ("1000..5000", (1000, 1024, 2048, 4096, 5000)),
        ("512,1000,4k", (512, 1000, 4096)),
        ("512,1k,1024,512..1k", (512, 1024)),
        ("4k,512", (4096, 512)),
        ("1024k", (MAX_LENGTH,)),
    ],
)
def test_lengths(text, lengths):
    assert parse_seq_lens(text) == lengths


@pytest.mark.parametrize(
    "text, token",
    [
        ("32k..512", "32k..512"), ("0", "0"), ("0..1k", "0..1k"), ("abc", "abc"), ("", ""), ("512,,1k", ""),
        ("..1k", "..1k"), ("512..", "512.."), ("512...1k", "512...1k"), ("-5..3", "-5..3"), ("1..2..4", "1..2..4"),
        ("99999999999999999999", "99999999999999999999"), ("4294967296", "4294967296"),
        ("1025k", "1025k"), ("1m", "1m"), ("1e3", "1e3"), ("1_024", "1_024"),
        ("0.5k..32k", "0.5k..32k"), ("٣", "٣"), ("512,32 k", "32 k"),
    ],
)  # fmt: skip
def test_bad_lengths_are_quoted(text, token):
    with pytest.raises(ValueError) as caught:
        parse_seq_lens(text)
    assert repr(token) in str(caught.value)
    assert "512..32k" in str(caught.value) and "512,1000,4k" in str(caught.value)


def test_heads():
    assert parse_heads("32:8, 16,32:8") == ((32, 8), (16, 16))
    for bad in ("5:3", "0:1", "8:0", "32:", ":8", "a", ""):
        with pytest.raises(ValueError, match="32:8"):
            parse_heads(bad)


def test_numbers():
    assert parse_numbers("64,128, 64", "head dim", 16, 256, 8) == (64, 128)
    for bad in ("100", "8", "264", "", "-64"):
        with pytest.raises(ValueError, match="from 16 to 256, multiples of 8"):
            parse_numbers(bad, "head dim", 16, 256, 8)


def test_durations():
    assert [parse_duration(text) for text in ("90s", "10m", "1.5h", "45")] == [90, 600, 5400, 45]
    for bad in ("0", "-1m", "10 minutes", "", "1e3"):
        with pytest.raises(ValueError, match="10m"):
            parse_duration(bad)

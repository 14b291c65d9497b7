"""The fingerprint of the kernels' code: the same on every Python, another one for other code."""

from zyfa.kernels import _SOURCES, _code, kernel_hash


def test_an_f_string_is_one_token_on_every_python():
    """Python 3.12 takes f-strings apart, and gave the same sources another fingerprint than 3.11."""
    assert _code('x = f"a {b!r:>4} {{c}}" f\'{d["e"]}\'\n') == 'x = f"a {b!r:>4} {{c}}" f\'{d["e"]}\' NEWLINE '
    assert _code('y = (f"""one\n{two}\n""")\n') == 'y = ( f"""one\n{two}\n""" ) NEWLINE '


def test_comments_docstrings_and_layout_do_not_count():
    told = _code('def f(a,\n      b):  # why\n    """What."""\n    return a\n')
    assert told == _code('def f(a, b):\n    """Else."""\n\n    return a\n')
    assert _code("a = 1\n") != _code("a = 2\n")


def test_every_source_that_is_compiled_has_a_part_in_it():
    from pathlib import Path

    import zyfa.kernels

    folder = Path(zyfa.kernels.__file__).parent
    compiled = {path.name for path in folder.glob("*.py") if "jit\n" in path.read_text() and path.name != "__init__.py"}
    assert compiled - set(_SOURCES) == {"attn_gluon_amd.py", "gluon_lds.py"}, "these two: see the comment there"
    assert len(kernel_hash()) == 16

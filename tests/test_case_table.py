"""Every public failure case has a test, and docs/cases.md says which."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "case_table.py"
table = runpy.run_path(str(SCRIPT))


def test_every_case_has_a_test_that_needs_no_gpu():
    tests = table["all_tests"]()
    assert {test.case for test in tests} == set(table["case_ids"]())
    assert {test.case for test in tests if test.place != "GPU"} == set(table["case_ids"]())
    assert set(table["DECISIONS"]) <= set(table["case_ids"]())


def test_the_page_is_in_step():
    assert table["PAGE"].read_text() == table["page"](table["all_tests"]()), "run scripts/case_table.py"


def test_places_are_read_from_the_tests(tmp_path):
    path = tmp_path / "test_x.py"
    path.write_text(
        '@case("O-NUM-01")\n@pytest.mark.gpu\ndef test_a(): pass\n'
        '@case("O-NUM-01")\n@case("O-NUM-02")\ndef test_b(interpret): pass\n'
        '@case("O-NUM-03")\ndef test_c():\n    accesses(1)\n'
        "def test_d(): pass\n"
    )
    assert [(t.case, t.name[-1], t.place) for t in table["tests_in"](path)] == [
        ("O-NUM-01", "a", "GPU"), ("O-NUM-01", "b", "interpreter"), ("O-NUM-02", "b", "interpreter"),
        ("O-NUM-03", "c", "compiled"),
    ]  # fmt: skip

"""Who may import whom, what `import zyfa` may load, and how long a file may get."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"zyfa": "zyfa", "tuner": "zyfa.tuner", "tuning_db": "zyfa.tuning_db"}  # folder: import name

# (files, what none of them imports). Names below a forbidden name are forbidden too. The tuner launches a given config,
# so it has no use for the call that looks one up; only benchmarks time the call that users make.
FORBIDDEN = [
    ("zyfa/**/*.py", {"zyfa.tuner", "optuna", "click", "sqlite_utils", "sqlalchemy", "rich", "platformdirs"}),
    ("zyfa/kernels/*.py", {"zyfa.tuning_db", "zyfa.lookup", "zyfa.interface", "zyfa.device"}),
    ("zyfa/config.py", {"torch", "triton", "zyfa.device", "zyfa.kernels", "zyfa.tuning_db", "zyfa.lookup"}),
    ("tuner/**/*.py", {"zyfa.interface", "zyfa.attention", "zyfa.explain"}),
    ("tuning_db/**/*.py", {"torch", "triton", "zyfa.tuner", "zyfa.interface", "zyfa.lookup", "zyfa.kernels"}),
]
BENCHMARKS = "tuner/bench_*.py"
HEAVY = "optuna", "click", "sqlite_utils", "sqlalchemy", "rich", "platformdirs"


def sources(pattern: str) -> list[Path]:
    return sorted(ROOT.glob(pattern))


def all_sources():
    return [path for folder in PACKAGES for path in sources(f"{folder}/**/*.py")]


def module_name(path: Path) -> str:
    """zyfa.tuner.space for <root>/tuner/space.py, zyfa.tuner for <root>/tuner/__init__.py."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *rest]).removesuffix(".__init__")


def imported(text: str, module: str, is_package: bool = False) -> set[str]:
    """Every absolute name that the text of a module imports, also inside functions: a.b for `from a import b`."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([base] if base else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def imports_of(path: Path) -> set[str]:
    return imported(path.read_text(), module_name(path), path.name == "__init__.py")


def violations(names: set[str], forbidden: set[str]) -> set[str]:
    return {name for name in names for f in forbidden if name == f or name.startswith(f"{f}.")}


@pytest.mark.parametrize("pattern, forbidden", FORBIDDEN, ids=[pattern for pattern, _ in FORBIDDEN])
def test_imports_point_in_one_direction(pattern, forbidden):
    paths = set(sources(pattern)) - set(sources(BENCHMARKS))
    assert paths
    found = {str(path.relative_to(ROOT)): bad for path in paths if (bad := violations(imports_of(path), forbidden))}
    assert found == {}


def test_runtime_reaches_the_database_only_through_lookup():
    readers = [path.name for path in sources("zyfa/**/*.py") if violations(imports_of(path), {"zyfa.tuning_db"})]
    assert readers == ["lookup.py"]


@pytest.mark.parametrize(
    "text, module, expected",
    [
        ("from .. import tuner", "zyfa.kernels.launch", "zyfa.tuner"),
        ("def f():\n    from ..lookup import choose", "zyfa.kernels.launch", "zyfa.lookup.choose"),
        ("from zyfa import attention", "zyfa.tuner.evaluate", "zyfa.attention"),
        ("import zyfa.tuner.space as s", "zyfa.device", "zyfa.tuner.space"),
        ("from .schema import migrate", "zyfa.tuning_db.store", "zyfa.tuning_db.schema.migrate"),
    ],
)
def test_imports_are_read_as_python_resolves_them(text, module, expected):
    assert imported(text, module) == {expected}
    assert imported("from .interface import attention", "zyfa", is_package=True) == {"zyfa.interface.attention"}


def test_import_zyfa_loads_nothing_of_the_tuner(tmp_path):
    """In a fresh process outside the checkout, which also shows that neither a GPU nor a home directory is needed."""
    code = f"import sys, zyfa; print([name for name in {HEAVY} if name in sys.modules], 'zyfa.tuner' in sys.modules)"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "missing")}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.stdout == "[] False\n", run.stderr


# --- size -------------------------------------------------------------------------------------------------------------


def functions(path: Path):
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_lines(function) -> int:
    return function.end_lineno - function.body[0].lineno + 1


def is_kernel(function) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_files_hold_one_room_each():
    """A file of more than 400 lines holds two rooms; so does a test file."""
    paths = [*all_sources(), *sources("tests/**/*.py"), *sources("scripts/**/*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def test_functions_are_short():
    kernels = {
        f"{path.name}:{f.name}": body_lines(f) for path in all_sources() for f in functions(path) if is_kernel(f)
    }
    assert kernels, "the decorator is no longer recognised"
    assert {name: n for name, n in kernels.items() if n > 120} == {}
    lengths = [f.end_lineno - f.lineno + 1 for path in all_sources() for f in functions(path)]
    assert statistics.median(lengths) <= 12

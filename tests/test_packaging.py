"""What an installed ZYFA consists of, and how .venv is set up. A real wheel is checked by scripts/check_wheel.sh."""

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import zyfa

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def load_setup_env():
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts/setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_env = load_setup_env()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(r.specifier).startswith("==") for r in requirements)
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}


# --- the distribution -------------------------------------------------------------------------------------------------


def test_every_package_is_listed():
    """They are listed by hand, so a new folder would be missing from the wheel and only there."""
    folders = PYPROJECT["tool"]["setuptools"]["package-dir"]
    found = {
        f"{name}.{path.parent.relative_to(ROOT / folder).as_posix().replace('/', '.')}".removesuffix("..").rstrip(".")
        for name, folder in folders.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_data_file_is_shipped_but_the_texts_for_review():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["zyfa.tuning_db"]
    shipped = {path for pattern in patterns for path in (ROOT / "tuning_db").glob(pattern)}
    data = set((ROOT / "tuning_db/data").glob("*"))
    assert data - shipped == {path.with_suffix(".txt") for path in shipped}


def test_shipped_databases_open_from_a_read_only_folder():
    """Bytes 18 and 19 of an SQLite file are 2 in WAL mode, which needs to write beside the file even to read it."""
    for path in (ROOT / "tuning_db/data").glob("*.sqlite"):
        head = path.read_bytes()[:20]
        assert head.startswith(b"SQLite format 3\0") and head[18:20] == b"\x01\x01", path.name


def test_version_is_stated_once():
    version = PYPROJECT["project"]["version"]
    assert zyfa.__version__ == version == importlib.metadata.version("zyfa")
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_console_scripts_exist():
    installed = {e.name: e for e in importlib.metadata.entry_points(group="console_scripts") if e.dist.name == "zyfa"}
    assert set(installed) == set(PYPROJECT["project"]["scripts"])
    for entry in installed.values():
        assert callable(entry.load())


def test_triton_comes_with_torch():
    """A requirement on Triton of our own would put NVIDIA's build over the one of a ROCm torch."""
    assert {Requirement(r).name for r in PYPROJECT["project"]["dependencies"]} == {"torch"}


# --- the pins ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "requirement",
    [
        *PYPROJECT["project"]["dependencies"],
        *EXTRAS["tune"],
        *EXTRAS["test"],
        *EXTRAS["dev"],
        *PYPROJECT["build-system"]["requires"],
    ],
)
def test_pins_satisfy_what_is_required(requirement):
    required = Requirement(requirement)
    assert required.specifier.contains(pins()[canonicalize_name(required.name)])


def test_pins_hold_for_everything_that_is_installed_with_us():
    """An unpinned dependency of a dependency would differ from one machine to the next."""
    seen, queue = set(), [Requirement("zyfa[tune,test,dev]")]
    while queue:
        requirement = queue.pop()
        for needed in map(Requirement, importlib.metadata.requires(requirement.name) or ()):
            environments = [{"extra": extra} for extra in requirement.extras or {""}]
            wanted = needed.marker is None or any(map(needed.marker.evaluate, environments))
            if wanted and canonicalize_name(needed.name) not in seen:
                seen.add(canonicalize_name(needed.name))
                queue.append(needed)
    # Every venv brings pip; what torch is built on is torch's choice.
    ours = {name for name in seen if not re.match(r"pip$|nvidia-|cuda-|triton|pytorch-triton", name)}
    assert "optuna" in ours and "sqlalchemy" in ours
    assert ours - set(pins()) == set()


# --- the set-up -------------------------------------------------------------------------------------------------------


def test_a_machine_with_a_gpu_torch_keeps_it():
    machine = {"torch": "2.11.0+rocm7.0", "numpy": "2.3.5", "rich": "14.0.0", "typing-extensions": "4.12.0"}
    lines = setup_env.constraints(
        "torch==2.13.0\ntriton==3.7.1\nrich==15.0.0\ntyping_extensions==4.16.0\nclick==8.5.1", machine
    )
    # rich and typing_extensions may stay as they are; torch and numpy must.
    assert lines.splitlines() == ["triton==3.7.1", "click==8.5.1", "torch==2.11.0+rocm7.0", "numpy==2.3.5"]


def test_other_machines_get_every_pin():
    text = (ROOT / "constraints.txt").read_text()
    assert setup_env.constraints(text, {}) == text


@pytest.mark.parametrize("changed", setup_env.INPUTS)
def test_a_changed_input_asks_for_another_set_up(tmp_path, changed):
    for name in setup_env.INPUTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    before = setup_env.digest(tmp_path)
    assert setup_env.digest(tmp_path) == before
    (tmp_path / changed).write_text("two")
    assert setup_env.digest(tmp_path) != before


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A .venv that looks as one made here by this Python does."""
    venv = tmp_path / ".venv"
    for name, path in (("VENV", venv), ("PYTHON", Path(sys.executable)), ("MARKER", venv / "zyfa-setup")):
        monkeypatch.setattr(setup_env, name, path)
    venv.mkdir()
    facts = (
        f"include-system-site-packages = false\nversion = {sys.version.split()[0]}\ncommand = python -m venv {venv}\n"
    )
    (venv / "pyvenv.cfg").write_text(facts)
    (venv / "zyfa-setup").write_text("digest of other inputs")
    return venv


def test_a_whole_venv_is_reused(venv):
    assert setup_env.reusable({})
    assert not setup_env.reusable({"torch": "2.11.0"})  # it must see the machine's packages, and does not


def test_an_interrupted_or_foreign_venv_is_made_anew(venv):
    (venv / "zyfa-setup").write_text(setup_env.UNFINISHED)
    assert not setup_env.reusable({})
    (venv / "zyfa-setup").unlink()
    assert setup_env.reusable({})  # made by hand, and whole
    cfg = venv / "pyvenv.cfg"
    whole = cfg.read_text()
    for broken in (whole.replace(str(venv), "/elsewhere/.venv"), whole.replace("version = 3", "version = 2"), ""):
        cfg.write_text(broken)
        assert not setup_env.reusable({})

"""Makes .venv ready to run, test and tune ZYFA, or says at once that it is: `python scripts/setup_env.py`.

Standard library only. Two kinds of machine:
- its Python has a torch for an NVIDIA or AMD GPU, and a Triton: .venv sees that Python's packages, installs neither;
- any other: torch and Triton at the versions of constraints.txt.
A marker in .venv holds a digest of what .venv was made from, or says that a set-up was interrupted; then .venv is made
anew. Started twice at once, the second waits.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin/python"
MARKER = VENV / "zyfa-setup"
UNFINISHED = "unfinished"
INPUTS = ("pyproject.toml", "constraints.txt", "scripts/setup_env.py")
MACHINE_OWNED = ("torch", "triton", "numpy")  # numpy too: an older Triton's interpreter fails with a newer numpy

# Prints {name: version} of all that this Python has, or {} unless it has a torch for a GPU, and a Triton.
PROBE = """
import importlib.metadata, json
try:
    import torch, triton
    usable = torch.version.cuda or torch.version.hip
except Exception:
    usable = None
found = importlib.metadata.distributions() if usable else ()
print(json.dumps({d.metadata["Name"]: d.version for d in found}))
"""


def canonical(name: str) -> str:
    """The spelling under which package names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def digest(root: Path) -> str:
    """Changes when .venv would be made differently."""
    state = hashlib.sha256("\0".join((sys.executable, sys.version, str(root))).encode())
    for name in INPUTS:
        state.update((root / name).read_bytes())
    return state.hexdigest()


def machine_packages() -> dict[str, str]:
    """{name: version} of this Python's packages if it has a torch for a GPU; else {}."""
    # The probe's last line only: a torch may greet on import.
    probe = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True)
    return {canonical(name): version for name, version in json.loads(probe.stdout.splitlines()[-1]).items()}


def constraints(text: str, machine: dict[str, str]) -> str:
    """constraints.txt for this machine: what the machine has keeps its version, torch, Triton and numpy strictly."""
    pins = [line for line in text.splitlines() if canonical(line.partition("==")[0]) not in machine]
    pins += [f"{name}=={machine[name]}" for name in MACHINE_OWNED if name in machine]
    return "\n".join(pins) + "\n"


def reusable(machine: dict[str, str]) -> bool:
    """Whether .venv is whole, was made here by this Python and sees the machine's packages exactly if it should."""
    cfg = (VENV / "pyvenv.cfg").read_text() if (VENV / "pyvenv.cfg").exists() else ""
    facts = dict(line.split(" = ", 1) for line in cfg.splitlines() if " = " in line)
    return (
        (not MARKER.exists() or MARKER.read_text() != UNFINISHED)
        and facts.get("version") == sys.version.split()[0]
        and facts.get("include-system-site-packages") == str(bool(machine)).lower()
        and facts.get("command", "").endswith(f" {VENV}")
        and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0
    )


def create(machine: dict[str, str]) -> None:
    """An empty .venv, marked unfinished from its first moment on."""
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    MARKER.write_text(UNFINISHED)
    subprocess.run([sys.executable, "-m", "venv", *(["--system-site-packages"] if machine else []), VENV], check=True)
    if machine and sys.prefix != sys.base_prefix:  # a venv of a venv sees only the Python below both
        outer = sysconfig.get_path("purelib")
        inner = next((VENV / "lib").glob("python*/site-packages"))
        (inner / "outer-venv.pth").write_text(outer + "\n")


def install(machine: dict[str, str]) -> None:
    """The project, editable, with its extras. Never torch by itself: the pins go into the same call."""
    pins = VENV / "constraints.txt"
    pins.write_text(constraints((ROOT / "constraints.txt").read_text(), machine))
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--constraint", str(pins)]
    build_system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    subprocess.run([*pip, *build_system["requires"]], check=True)
    stack = [] if machine else ["torch", "triton"]
    # No isolated build: it would resolve, unpinned, what has just been installed.
    subprocess.run([*pip, "--no-build-isolation", "--editable", f"{ROOT}[tune,test,dev]", *stack], check=True)


def main() -> None:
    lock = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends
    wanted = digest(ROOT)
    if MARKER.exists() and MARKER.read_text() == wanted:
        return
    machine = machine_packages()
    source = f"this machine's torch {machine['torch']}" if machine else "the torch and Triton of constraints.txt"
    print(f"Setting up .venv with {source}; takes a few minutes, once.", flush=True)
    if not reusable(machine):
        create(machine)
    MARKER.write_text(UNFINISHED)
    install(machine)
    MARKER.write_text(wanted)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"setting up .venv failed: {' '.join(map(str, error.cmd[:6]))} … exited with {error.returncode}")

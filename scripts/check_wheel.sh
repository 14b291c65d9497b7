#!/usr/bin/env bash
# Builds the sdist, from it the wheel, installs that in a clean environment outside the checkout, and proves that it is
# whole: one import name, every module and shipped database inside, the console scripts run. Needs `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
source_root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH

# From a copy: setuptools would also pack what an earlier build left in *.egg-info and build/.
mkdir "$work/source"
cp -r pyproject.toml README.md LICENSE zyfa tuner tuning_db "$work/source"
"$python" -m build --no-isolation --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
wheel=$(echo "$work"/dist/zyfa-*.whl)
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-index "$wheel"

cd "$work" # so that nothing can be imported from the checkout
for name in tuner tuning_db; do
    if venv/bin/python -c "import $name" 2>/dev/null; then
        echo "check_wheel: a top-level 'import $name' works: the wheel leaks a generic name" >&2
        exit 1
    fi
done

# torch and the other dependencies are borrowed from .venv. Directories named in a .pth file come after the clean
# environment's own, and the .pth files in them (the editable install of the checkout) are not read.
"$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    >"$(echo venv/lib/python3*/site-packages)/borrowed.pth"
venv/bin/python - "$source_root" "$wheel" <<'EOF'
import importlib, pathlib, sys, zipfile

source, wheel = pathlib.Path(sys.argv[1]), sys.argv[2]
for name in ("zyfa", "zyfa.kernels", "zyfa.tuner", "zyfa.tuning_db"):
    where = importlib.import_module(name).__file__
    assert where.startswith(sys.prefix), f"{name} comes from {where}, not from the wheel"
shipped = set(zipfile.ZipFile(wheel).namelist())
folders = {"zyfa": "zyfa", "tuner": "zyfa/tuner", "tuning_db": "zyfa/tuning_db"}
for folder, inside in folders.items():
    for pattern in ("**/*.py", "data/*.sqlite"):
        for path in (source / folder).glob(pattern):
            member = f"{inside}/{path.relative_to(source / folder)}"
            assert member in shipped, f"{path.relative_to(source)} is missing in the wheel"
            shipped.remove(member)
stray = [name for name in shipped if name.endswith((".py", ".sqlite"))]
assert not stray, f"in the wheel but not in the source: {stray}"
print(f"check_wheel: {pathlib.Path(wheel).name}, {sum(1 for _ in source.glob('tuning_db/data/*.sqlite'))} databases")
EOF
scripts=$(venv/bin/python -c 'import importlib.metadata as m
print(*(e.name for e in m.distribution("zyfa").entry_points if e.group == "console_scripts"))')
test -n "$scripts"
for script in $scripts; do
    "venv/bin/$script" -h >/dev/null
    echo "check_wheel: $script -h runs"
done

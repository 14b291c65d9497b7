"""Shared by all tests: no GPU means skip with a reason, same seeds everywhere, nobody's real database is touched."""

import os
import random

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy loads; as zyfa.tuner.__main__ does

import pytest
import torch
from interpreter import Interpreter

import zyfa
from zyfa import lookup
from zyfa.tuning_db import reader

# Bound before any test patches zyfa.interface: zyfa.__getattr__ would keep a patched function for the next tests.
REAL = {name: getattr(zyfa, name) for name in ("attention", "explain")}


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no NVIDIA or AMD GPU that this torch can use")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def nothing_left_patched():
    """Fails the test after which the package's names are not the interface's own: the next test would get them."""
    yield
    assert {name: getattr(zyfa, name) for name in REAL} == REAL


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def user_data_home(monkeypatch, tmp_path_factory):
    """An empty platform data directory for each test; the user database would lie under it."""
    path = tmp_path_factory.mktemp("data")
    monkeypatch.setenv("XDG_DATA_HOME", str(path))
    for name in ("ZYFA_TUNING_DB", "ZYFA_LOG"):
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.fixture
def nothing_shipped(monkeypatch, tmp_path):
    """An empty directory in place of the shipped databases, and no memory of other tests."""
    monkeypatch.setattr(reader, "DATA", tmp_path / "shipped")
    lookup.reset()
    yield
    lookup.reset()


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors are taken for those of an H200; see fake_gpu.py."""
    from fake_gpu import FakeGpu

    return FakeGpu(monkeypatch)


@pytest.fixture(scope="session")
def interpret():
    """Calls a function in a process that interprets Triton kernels; see interpreter.py."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()

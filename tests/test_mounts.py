"""A database on a network file system is written with a warning and read once, like any other."""

import pytest

from zyfa.tuning_db import mounts
from zyfa.tuning_db.mounts import network_type
from zyfa.tuning_db.store import Store


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Mounts as a machine with an NFS share inside another one, and a blank in a name, would list them."""
    share, local = tmp_path / "my share", tmp_path / "my share" / "local"
    local.mkdir(parents=True)
    lines = ["/dev/sda / ext4 rw 0 0", f"server:/x {str(share).replace(' ', chr(92) + '040')} nfs4 rw 0 0"]
    lines.append(f"/dev/sdb {str(local).replace(' ', chr(92) + '040')} xfs rw 0 0")
    path = tmp_path / "mounts"
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(mounts, "MOUNTS", path)
    return share


def test_the_deepest_mount_decides(table, tmp_path):
    assert network_type(table / "new.sqlite") == "nfs4"
    assert network_type(table / "local" / "new.sqlite") is None
    assert network_type(tmp_path / "new.sqlite") is None


def test_an_unreadable_table_warns_of_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "none")
    assert network_type(tmp_path) is None


def test_writers_are_warned_and_go_on(table):
    with (
        pytest.warns(RuntimeWarning, match="lies on nfs4, where SQLite's locks may not hold"),
        Store(table / "a") as store,
    ):
        assert store.trials() == []

"""zyfa.device: one key per GPU, whatever it calls itself."""

from types import SimpleNamespace

import pytest
import torch

from zyfa import device as device_module
from zyfa.device import TARGETS, Device, current_device, device_of_sku, identify, why

AMD = ("amd", "gfx950:sramecc+:xnack-", 256)


@pytest.mark.parametrize(
    "name, pci_id, sku",
    [
        ("AMD Instinct MI355X", 0x75A3, "mi355x"),
        ("", 0x75A3, "mi355x"),  # one container reports no name
        ("AMD Instinct MI350X", 0x75A3, "mi355x"),  # the id decides
        ("AMD Instinct MI350X VF", 0x75B0, "mi350x"),
        ("AMD Instinct MI355X", None, "mi355x"),
        ("AMD Instinct MI355 OAM", None, "mi355x"),
        ("AMD_Instinct_MI355X_OAM", None, "mi355x"),
        ("MI355X-O", None, "mi355x"),
        ("MI350X_VF", None, "mi350x"),
        ("AMD Radeon Graphics", 0x75A0, "mi350x"),
        ("AMD Radeon Graphics", 0x1234, "unknown-1234"),
        ("AMD Radeon Graphics", None, "unknown-amd-radeon-graphics"),
        ("", None, "unknown"),
    ],
)
def test_amd_names(name, pci_id, sku):
    device = identify(*AMD, name, pci_id)
    assert (device.arch, device.sku, device.units) == ("gfx950", sku, 256)
    assert device.names["arch"] == "gfx950:sramecc+:xnack-" and device.names["name"] == name


@pytest.mark.parametrize(
    "name, sku",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H20-3e", "h20-3e"),
        ("NVIDIA H2000", "unknown-nvidia-h2000"),
    ],
)
def test_nvidia_names(name, sku):
    assert identify("nvidia", "sm90", 132, name, None).sku == sku


def test_same_arch_and_units_but_other_sku():
    assert identify("amd", "gfx942", 304, "", 0x74A1).sku_key == "amd/gfx942/mi300x/cu304"
    assert identify("amd", "gfx942", 304, "", 0x74A5).sku_key == "amd/gfx942/mi325x/cu304"


def test_a_partition_keeps_the_sku_and_its_own_units():
    assert identify("amd", "gfx950", 32, "AMD Instinct MI355X", 0x75A3).sku_key == "amd/gfx950/mi355x/cu32"


def test_targets():
    assert device_of_sku("mi355x").sku_key == "amd/gfx950/mi355x/cu256"
    assert device_of_sku("mi300x").db_name == "amd-gfx942-mi300x-cu304"
    assert device_of_sku("h200").db_name == "nvidia-sm90-h200-sm132"
    with pytest.raises(ValueError, match=r"'mi999'.*mi355x, mi350x, mi325x, mi300x, h100, h200"):
        device_of_sku("mi999")


@pytest.mark.parametrize("sku", TARGETS)
def test_a_target_is_the_device_that_it_names(sku):
    target = device_of_sku(sku)
    assert identify(target.vendor, target.arch, target.units, sku, None) == target


def test_raw_names_do_not_make_another_device():
    assert Device("amd", "gfx950", "mi355x", 256, {"name": "a"}) == Device(
        "amd", "gfx950", "mi355x", 256, {"name": "b"}
    )
    assert len({Device("amd", "gfx950", "mi355x", 256, {"name": n}) for n in "ab"}) == 1


def test_current_device_is_told_apart_by_index(monkeypatch):
    props = {
        0: SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132),
        1: SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132),
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", props.__getitem__)
    monkeypatch.setattr(torch.version, "hip", None)
    current_device.cache_clear()
    try:
        keys = [current_device(i).sku_key for i in (0, 1, 0)]
    finally:
        current_device.cache_clear()
    assert keys == ["nvidia/sm90/h200/sm132", "nvidia/sm90/h100/sm132", "nvidia/sm90/h200/sm132"]


def test_pci_id_is_read_from_sysfs(monkeypatch, tmp_path):
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "device").write_text("0x75a3\n")
    monkeypatch.setattr(device_module, "Path", lambda p: tmp_path / str(p).removeprefix("/sys/bus/pci/devices/"))
    props = SimpleNamespace(
        name="", gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=256,
        pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    current_device.cache_clear()
    try:
        device = current_device(0)
    finally:
        current_device.cache_clear()
    assert device.sku_key == "amd/gfx950/mi355x/cu256" and device.names["pci_id"] == "75a3"


@pytest.mark.gpu
def test_this_gpu_is_known():
    device = current_device(0)
    assert not device.sku.startswith("unknown"), device
    assert device.units == torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize(
    "sku, units, partition",
    [("mi355x", 256, "spx"), ("mi355x", 128, "dpx"), ("mi355x", 64, "qpx"), ("mi355x", 32, "cpx"),
     ("mi300x", 304, "spx"), ("mi300x", 38, "cpx"), ("mi355x", 250, ""), ("h200", 132, ""), ("unknown-1234", 256, "")],
)  # fmt: skip
def test_partitions(sku, units, partition):
    assert Device("nvidia" if sku == "h200" else "amd", "gfx950", sku, units).partition == partition


@pytest.mark.parametrize(
    "name, pci_id, units, told",
    [
        ("", 0x75A3, 256, "mi355x: PCI device id 75a3"),
        ("AMD Instinct MI355X VF", 0x1234, 256, "mi355x: by its name; PCI device id 1234 is in no table"),
        ("AMD Radeon Graphics", None, 256, "unknown-amd-radeon-graphics: neither PCI device id (unreadable) nor name"),
        ("AMD Instinct MI355X", 0x75A3, 32, "32 cu visible of 256, so a partition, a slice or a smaller part (cpx)"),
    ],
)
def test_why_this_sku(name, pci_id, units, told):
    facts = dict(why(identify("amd", "gfx950:sramecc+:xnack-", units, name, pci_id)))
    assert any(told in text for text in facts.values())
    assert facts["arch"] == "gfx950, from 'gfx950:sramecc+:xnack-'" and facts["name"] == repr(name)

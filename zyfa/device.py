"""Which GPU this is: the only reader of device properties.

One chip has many names ("MI355X", "MI355 OAM", "MI350X_VF", an empty string in one container), and chips that differ
share architecture and unit count (MI350X and MI355X; MI300X and MI325X). So the SKU is resolved by PCI device id,
then by the words of its name, and stays "unknown-..." where neither is known.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

UNIT_NAMES = {"amd": "cu", "nvidia": "sm"}  # compute units, streaming multiprocessors

# vendor, arch, units of the full part: what `zyfa-tune --target` accepts.
TARGETS = {
    "mi355x": ("amd", "gfx950", 256),
    "mi350x": ("amd", "gfx950", 256),
    "mi325x": ("amd", "gfx942", 304),
    "mi300x": ("amd", "gfx942", 304),
    "h100": ("nvidia", "sm90", 132),
    "h200": ("nvidia", "sm90", 132),
}

# PCI device id -> SKU; AMD parts have one id for the card and one for its virtual functions. AMD's from its
# profiler's table of GPUs, NVIDIA's from the public PCI id list. Plain "h100" and "h200" are the SXM modules.
PCI_IDS = {
    ("amd", 0x75A3): "mi355x", ("amd", 0x75B3): "mi355x",
    ("amd", 0x75A0): "mi350x", ("amd", 0x75B0): "mi350x",
    ("amd", 0x75A2): "mi358x", ("amd", 0x75B2): "mi358x",
    ("amd", 0x74A5): "mi325x", ("amd", 0x74B9): "mi325x",
    ("amd", 0x74A1): "mi300x", ("amd", 0x74B5): "mi300x",
    ("amd", 0x74A9): "mi300x-hf", ("amd", 0x74BD): "mi300x-hf",
    ("amd", 0x74A2): "mi308x", ("amd", 0x74B6): "mi308x",
    ("amd", 0x74A0): "mi300a", ("amd", 0x74B4): "mi300a",
    ("nvidia", 0x2330): "h100", ("nvidia", 0x2331): "h100-pcie", ("nvidia", 0x2321): "h100-nvl",
    ("nvidia", 0x2335): "h200", ("nvidia", 0x233B): "h200-nvl",
    ("nvidia", 0x2329): "h20", ("nvidia", 0x232C): "h20-3e",
}  # fmt: skip

# Words of a name -> SKU; the first line whose words all occur decides, so the longer ones come first.
NAME_ALIASES = (
    ("mi355x", "mi355x"), ("mi355", "mi355x"), ("mi350x", "mi350x"), ("mi350", "mi350x"), ("mi358x", "mi358x"),
    ("mi325x", "mi325x"), ("mi325", "mi325x"), ("mi300x hf", "mi300x-hf"), ("mi300x", "mi300x"),
    ("mi308x", "mi308x"), ("mi300a", "mi300a"),
    ("gh200", "gh200"), ("h100 pcie", "h100-pcie"), ("h100 nvl", "h100-nvl"), ("h100", "h100"),
    ("h200 nvl", "h200-nvl"), ("h200", "h200"), ("h20 3e", "h20-3e"), ("h20", "h20"),
)  # fmt: skip


# Compute units of one die (XCD); a full part has eight dies, and a partition mode divides them.
UNITS_PER_DIE = {"mi355x": 32, "mi350x": 32, "mi325x": 38, "mi300x": 38, "mi300x-hf": 38}
PARTITIONS = {8: "spx", 4: "dpx", 2: "qpx", 1: "cpx"}


@dataclass(frozen=True)
class Device:
    """One kind of GPU, as far as tuning depends on it; `names` keeps every raw string that it was resolved from."""

    vendor: str  # "amd" or "nvidia"
    arch: str  # "gfx950", "gfx942", "sm90", ...
    sku: str  # "mi355x", "h200", ... or "unknown-<PCI id or name>"
    units: int  # compute units (AMD) or streaming multiprocessors (NVIDIA) that are visible, so a partition has fewer
    names: Mapping[str, str] = field(default_factory=dict, compare=False)

    @cached_property
    def sku_key(self) -> str:
        """Like "amd/gfx950/mi355x/cu256"."""
        return f"{self.vendor}/{self.arch}/{self.sku}/{UNIT_NAMES[self.vendor]}{self.units}"

    @property
    def partition(self) -> str:
        """ "spx", "dpx", "qpx" or "cpx" where the units are those of 8, 4, 2 or 1 dies of an AMD part; else ""."""
        dies, rest = divmod(self.units, UNITS_PER_DIE.get(self.sku, self.units + 1))
        return PARTITIONS.get(dies, "") if not rest else ""

    @property
    def db_name(self) -> str:
        """Like "amd-gfx950-mi355x-cu256": the database file of this SKU, without its suffix."""
        return self.sku_key.replace("/", "-")


def device_of_sku(sku: str) -> Device:
    """The full part that a target name means; raises ValueError naming the accepted ones."""
    if sku not in TARGETS:
        raise ValueError(f"target {sku!r} is unknown; accepted are {', '.join(TARGETS)}")
    vendor, arch, units = TARGETS[sku]
    return Device(vendor, arch, sku, units, {"target": sku})


@cache
def current_device(index: int) -> Device:
    """The GPU that torch calls cuda:<index> (ROCm included); raises what torch raises when there is none."""
    import torch  # here, because targets and file names need no torch

    props = torch.cuda.get_device_properties(index)
    pci_id = _pci_id(props)
    if torch.version.hip:
        return identify("amd", props.gcnArchName, props.multi_processor_count, props.name, pci_id)
    return identify("nvidia", f"sm{props.major}{props.minor}", props.multi_processor_count, props.name, pci_id)


def visible_devices() -> list[Device]:
    """The GPUs that this torch can use, in its order; none is an empty list."""
    import torch

    return [current_device(index) for index in range(torch.cuda.device_count())]


def identify(vendor: str, arch: str, units: int, name: str, pci_id: int | None) -> Device:
    """The Device of raw properties. `arch` may carry feature flags ("gfx950:sramecc+:xnack-"); name may be empty."""
    names = {"arch": arch, "name": name, "pci_id": "" if pci_id is None else f"{pci_id:04x}"}
    sku = PCI_IDS.get((vendor, pci_id)) if pci_id is not None else None
    sku = sku or _sku_of_name(name) or _unknown(names["pci_id"] or name)
    return Device(vendor, arch.split(":")[0], sku, units, names)


def why(device: Device) -> list[tuple[str, str]]:
    """(what, why): how the Device came about, for people."""
    pci_id, name = device.names.get("pci_id", ""), device.names.get("name", "")
    if pci_id and (device.vendor, int(pci_id, 16)) in PCI_IDS:
        sku = f"{device.sku}: PCI device id {pci_id}"
    elif _sku_of_name(name) == device.sku:
        sku = f"{device.sku}: by its name; PCI device id {pci_id or 'unreadable'} is in no table"
    else:
        sku = f"{device.sku}: neither PCI device id {pci_id or '(unreadable)'} nor name {name!r} is in a table"
    full = TARGETS.get(device.sku, ("", "", device.units))[2]
    part = f" of {full}, so a partition, a slice or a smaller part" if device.units != full else ""
    mode = f" ({device.partition})" if device.partition else ""
    return [
        ("key", device.sku_key), ("database", f"{device.db_name}.sqlite"), ("sku", sku),
        ("arch", f"{device.arch}, from {device.names.get('arch') or device.arch!r}"),
        ("units", f"{device.units} {UNIT_NAMES[device.vendor]} visible{part}{mode}"), ("name", repr(name)),
    ]  # fmt: skip


def _sku_of_name(name: str) -> str | None:
    words = set(_words(name))
    return next((sku for alias, sku in NAME_ALIASES if words.issuperset(alias.split())), None)


def _unknown(what: str) -> str:
    return "-".join(["unknown", *_words(what)])


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _pci_id(props) -> int | None:
    """The 16-bit PCI device id, or None where it cannot be read.

    torch's `pci_device_id` is the slot on the bus, not the id of the model; Linux has that in sysfs.
    """
    try:
        address = f"{props.pci_domain_id:04x}:{props.pci_bus_id:02x}:{props.pci_device_id:02x}.0"
        return int(Path(f"/sys/bus/pci/devices/{address}/device").read_text(), 16)
    except (AttributeError, OSError, ValueError):
        return None

"""What the driver says of a GPU while it is timed: clocks, power, temperature. Where no driver library is, nothing.

NVIDIA: nvidia-ml-py; AMD: amdsmi, which comes with ROCm. Both are optional, and no failure of theirs is one of ours.
"""

from collections.abc import Callable
from typing import Any

Reading = dict[str, float]  # sm_mhz, memory_mhz, power_w, temperature_c


def nothing() -> Reading:
    """The reader where there is nothing to read."""
    return {}


def reader(gpu: int) -> Callable[[], Reading]:
    """A function that reads the sensors of torch's GPU number `gpu` (0.1 to 1 ms), as far as the driver tells them."""
    import torch

    try:
        props: Any = torch.cuda.get_device_properties(gpu)  # older stubs lack the address
        address = f"{props.pci_domain_id:04x}:{props.pci_bus_id:02x}:{props.pci_device_id:02x}.0"
        read = _amd(address) if torch.version.hip else _nvidia(address)
        read()
    except Exception:  # ImportError, AttributeError, and each library's own errors, which share no base
        return nothing
    return lambda: _read_or_nothing(read)


def _read_or_nothing(read: Callable[[], Reading]) -> Reading:
    try:
        return read()
    except Exception:  # a sensor that stopped answering is no reason to lose a trial
        return {}


def _nvidia(address: str) -> Callable[[], Reading]:
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByPciBusId(address)
    return lambda: {
        "sm_mhz": float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
        "memory_mhz": float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)),
        "power_w": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        "temperature_c": float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    }


def _amd(address: str) -> Callable[[], Reading]:
    import amdsmi

    amdsmi.amdsmi_init()
    gpu = amdsmi.amdsmi_get_processor_handle_from_bdf(address)
    clock, kind, metric = amdsmi.AmdSmiClkType, amdsmi.AmdSmiTemperatureType, amdsmi.AmdSmiTemperatureMetric

    def read() -> Reading:
        power = amdsmi.amdsmi_get_power_info(gpu)
        told = {
            "sm_mhz": amdsmi.amdsmi_get_clock_info(gpu, clock.GFX)["clk"],
            "memory_mhz": amdsmi.amdsmi_get_clock_info(gpu, clock.MEM)["clk"],
            "power_w": power["current_socket_power"],
            "temperature_c": amdsmi.amdsmi_get_temp_metric(gpu, kind.HOTSPOT, metric.CURRENT),
        }
        return {
            name: float(value) for name, value in told.items() if isinstance(value, int | float)
        }  # "N/A" is left out

    return read

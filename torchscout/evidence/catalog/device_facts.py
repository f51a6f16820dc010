"""What of a machine decides which kernel runs (paper, section 6.2, offline discovery).

Asked of the device, never of its name in a configuration.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform

import torch

__all__ = ["device_facts"]


def device_facts(device: torch.device) -> dict[str, str]:
    """Device, driver, and the versions that compile for it."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else f"cpu {platform.machine()}",
        "driver": _driver() if is_cuda else "none",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none",
    }


def _driver() -> str:
    """The NVIDIA driver's version, from its own library; torch knows only which CUDA it serves."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return f"unknown, CUDA {torch.version.cuda}"
    text = ctypes.create_string_buffer(96)
    library.nvmlInit_v2()
    failed = library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
    library.nvmlShutdown()
    return f"unknown, NVML error {failed}" if failed else text.value.decode()

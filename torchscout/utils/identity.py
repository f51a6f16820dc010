"""Names machines and devices as the people and programs that act on them do."""

from __future__ import annotations

import os
import re
import socket
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torchscout.log import log

__all__ = ["HOST_VARIABLES", "device_name", "host_name", "is_host_name", "job_name", "launcher_job"]

HOST_VARIABLES = ("TORCHSCOUT_HOST", "SLURMD_NODENAME", "NODE_NAME")
"""Where the name of this machine is looked for, before its hostname: a setting, Slurm, Kubernetes (where
``NODE_NAME`` is the usual name for the field ``spec.nodeName``)."""
_JOB_VARIABLES = (
    ("Slurm job", "SLURM_JOB_ID"),
    ("PBS job", "PBS_JOBID"),
    ("LSF job", "LSB_JOBID"),
    ("torchrun", "TORCHELASTIC_RUN_ID"),
)
_NO_NAME = re.compile(r"none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""What torchrun calls a run without ``--rdzv-id``, which nobody can look for."""
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,254}")


def is_host_name(name: str) -> bool:
    """Whether this can be the name of a machine. Such a name can be passed to any command: it has neither
    spaces nor separators, and does not begin like an option."""
    return _HOST_NAME.fullmatch(name) is not None


def host_name() -> str:
    """Return the name by which an operator or a scheduler addresses this machine."""
    for variable in HOST_VARIABLES:
        name = os.environ.get(variable, "")
        if is_host_name(name):
            return name
        if name:
            log.warning("%s=%.80r is not the name of a machine; it is ignored", variable, name)
    return socket.gethostname()


def job_name() -> str:
    """Return the name that the user gave to this job; empty if there is none."""
    return os.environ.get("TORCHSCOUT_JOB") or os.environ.get("SLURM_JOB_NAME", "")


def launcher_job() -> str:
    """Return what the launcher of this process calls its job, such as ``Slurm job 4711``; empty if it is not
    known."""
    found = ((words, value) for words, variable in _JOB_VARIABLES if (value := os.environ.get(variable, "")))
    pod = os.environ.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in os.environ else ""
    named = [*found, *([("pod", pod)] if pod else [])]
    return ", ".join(
        f"{words} {value:.100}"
        for words, value in named
        if value.isprintable() and not _NO_NAME.fullmatch(value)
    )


def device_name(properties: Any) -> str:
    """Describe a device from ``torch.cuda.get_device_properties``, by what its vendor's tools print.

    For example ``GPU-0a1b..., PCI 0000:65:00.0, serial 1652922012345``, as far as it is known.
    """
    uuid = getattr(properties, "uuid", None)
    uuid = None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
    parts = [uuid, _pci_address(properties), _serial_number(uuid)]
    return ", ".join(each for each in parts if each is not None)


def _pci_address(properties: Any) -> str | None:
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, device = (getattr(properties, name, None) for name in names)
    if domain is None or bus is None or device is None:
        return None
    return f"PCI {domain:04x}:{bus:02x}:{device:02x}.0"


def _serial_number(uuid: str | None) -> str | None:
    """Ask NVML, if it is installed. Consumer devices have no serial number."""
    if uuid is None or find_spec("pynvml") is None:
        return None
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            serial = nvml.nvmlDeviceGetSerial(nvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
    return f"serial {serial.decode() if isinstance(serial, bytes) else serial}"

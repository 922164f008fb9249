"""Finds the device files of the GPUs on which a worker does not grade. The worker closes them for itself.

A process that starts the CUDA driver looks at every GPU whose device file it can open, whatever ``CUDA_VISIBLE_DEVICES`` says, and
the driver serves one process of the host at a time. Every grading starts such a process: on a host with many GPUs this would limit
all of them together (docs/measurements).
"""

from __future__ import annotations

import re
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder with one folder for each NVIDIA GPU, by PCI address (driver)."""
DEVICES = Path("/dev")
"""Folder with the device files ``nvidia0``, ``nvidia1`` and so on."""


def others(uuid: str, *, driver: Path = DRIVER, devices: Path = DEVICES) -> list[str]:
    """Return the device files of all GPUs but one.

    Args:
        uuid: of the GPU to keep, as the driver names it (``GPU-...``).
        driver: folder in which the driver describes its GPUs.
        devices: folder of the device files.

    Returns:
        Paths of files that exist; none where the driver does not tell which file belongs to this GPU.
    """
    kept = None
    for information in sorted(driver.glob("*/information")):
        try:
            told = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", information.read_text(), re.MULTILINE))
        except OSError:
            continue
        if told.get("GPU UUID") == uuid:
            kept = told.get("Device Minor")
    if kept is None:
        return []
    return sorted(str(f) for f in devices.glob("nvidia[0-9]*") if f.name != f"nvidia{kept}")

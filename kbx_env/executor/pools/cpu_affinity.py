"""Divides the CPU cores among GPUs: processes on cores near their GPU do not slow each other down."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

PLACES = Path("/sys/devices/system/cpu")
"""Folder with one folder for each CPU core (Linux)."""
DEVICES = Path("/sys/bus/pci/devices")
"""Folder with one folder for each PCI device (Linux)."""
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder with one folder for each NVIDIA GPU, by PCI address (driver)."""


def shares(
    uuids: Sequence[str], cores: Collection[int] | None = None, *, places: Path = PLACES, devices: Path = DEVICES,
    driver: Path = DRIVER,
) -> list[frozenset[int]]:  # fmt: skip
    """Divide CPU cores among GPUs in equal shares, near each GPU where the system tells its memory node.

    Hardware threads of one core, and cores of one memory node, stay together as far as equal shares allow it.

    Args:
        uuids: of the GPUs, as the driver names them (``GPU-...``); "" for a GPU without a known id.
        cores: numbers of the cores to divide; by default the cores that this process may use.
        places: folder in which the system describes its cores.
        devices: folder in which the system describes its PCI devices.
        driver: folder in which the driver describes its GPUs.

    Returns:
        A set of cores for each GPU. With fewer cores than GPUs, every GPU gets all cores.
    """
    available = sorted(os.sched_getaffinity(0) if cores is None else cores)
    share = len(available) // max(1, len(uuids))
    if len(uuids) < 2 or not share:
        return [frozenset(available)] * len(uuids)
    position = {c: (_node(places / f"cpu{c}"), _first_thread(places / f"cpu{c}", c), c) for c in available}
    left = sorted(available, key=position.__getitem__)
    nodes = [_node_of_gpu(u, devices, driver) for u in uuids]
    found: dict[int, frozenset[int]] = {}
    # GPUs with a known memory node choose first, and take the cores of their node first.
    for k in sorted(range(len(uuids)), key=lambda k: (nodes[k] is None, nodes[k] or 0, k)):
        near = [c for c in left if nodes[k] is not None and position[c][0] == nodes[k]]
        chosen = (near + [c for c in left if c not in near])[:share]
        left = [c for c in left if c not in chosen]
        found[k] = frozenset(chosen)
    return [found[k] for k in range(len(uuids))]


def _node(folder: Path) -> int:
    """Return the memory node of a core, 0 if the system does not tell."""
    return min((int(p.name[4:]) for p in folder.glob("node*") if p.name[4:].isdigit()), default=0)


def _first_thread(folder: Path, core: int) -> int:
    """Return the first hardware thread of the same physical core."""
    try:
        return int((folder / "topology/thread_siblings_list").read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core


def _node_of_gpu(uuid: str, devices: Path, driver: Path) -> int | None:
    """Return the memory node of a GPU, ``None`` if driver or system do not tell."""
    for folder in sorted(driver.glob("*")) if uuid else ():
        try:
            if uuid in (folder / "information").read_text():
                node = int((devices / folder.name.lower() / "numa_node").read_text())
                return node if node >= 0 else None
        except (OSError, ValueError):
            continue
    return None

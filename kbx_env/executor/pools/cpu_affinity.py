"""Which cores go with which GPU: processes that stay beside their GPU's memory do not slow each other down."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

PLACES = Path("/sys/devices/system/cpu")
DEVICES = Path("/sys/bus/pci/devices")
DRIVER = Path("/proc/driver/nvidia/gpus")


def shares(
    uuids: Sequence[str], cores: Collection[int] | None = None, *, places: Path = PLACES, devices: Path = DEVICES,
    driver: Path = DRIVER,
) -> list[frozenset[int]]:  # fmt: skip
    """The cores of each GPU: equal shares, near the GPU where the system tells what is near.

    Threads of a core, and cores of a memory node, stay together as far as equal shares allow it.

    Args:
        uuids: of the GPUs, as the driver names them (``GPU-...``); one may be "" where it is not known.
        cores: to share out; default: those that this process may use.
        places: folder in which the system describes its cores.
        devices: the same of PCI devices.
        driver: the same of NVIDIA's GPUs.

    Returns:
        A set of cores for each GPU. With fewer cores than GPUs all have all of them.
    """
    mine = sorted(os.sched_getaffinity(0) if cores is None else cores)
    each = len(mine) // max(1, len(uuids))
    if len(uuids) < 2 or not each:
        return [frozenset(mine)] * len(uuids)
    home = {c: (_node(places / f"cpu{c}"), _first_thread(places / f"cpu{c}", c), c) for c in mine}
    left = sorted(mine, key=home.__getitem__)
    nodes = [_node_of_gpu(u, devices, driver) for u in uuids]
    found: dict[int, frozenset[int]] = {}
    # Those whose node is known choose first; each begins with the cores of its own.
    for k in sorted(range(len(uuids)), key=lambda k: (nodes[k] is None, nodes[k] or 0, k)):
        near = [c for c in left if nodes[k] is not None and home[c][0] == nodes[k]]
        chosen = (near + [c for c in left if c not in near])[:each]
        left = [c for c in left if c not in chosen]
        found[k] = frozenset(chosen)
    return [found[k] for k in range(len(uuids))]


def _node(place: Path) -> int:
    return min((int(p.name[4:]) for p in place.glob("node*") if p.name[4:].isdigit()), default=0)


def _first_thread(place: Path, core: int) -> int:
    try:
        return int((place / "topology/thread_siblings_list").read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core


def _node_of_gpu(uuid: str, devices: Path, driver: Path) -> int | None:
    """``None`` where neither driver nor system tell."""
    for folder in sorted(driver.glob("*")) if uuid else ():
        try:
            if uuid in (folder / "information").read_text():
                node = int((devices / folder.name.lower() / "numa_node").read_text())
                return node if node >= 0 else None
        except (OSError, ValueError):
            continue
    return None

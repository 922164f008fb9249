"""Which device files a worker closes: those of the other GPUs, and none where it is not sure."""

from __future__ import annotations

from pathlib import Path

from kbx_env.executor.pools.gpu_files import others


def host(folder: Path, uuids: dict[str, int]) -> dict[str, Path]:
    """A driver that describes GPUs, with device files, one of them of a GPU that it does not describe."""
    driver, devices = folder / "gpus", folder / "dev"
    for k, (uuid, minor) in enumerate(uuids.items()):
        (driver / f"0000:{k:02d}:00.0").mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        (driver / f"0000:{k:02d}:00.0" / "information").write_text(text)
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia7", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (devices / name).touch()
    return {"driver": driver, "devices": devices}


def test_the_files_of_all_other_gpus(tmp_path: Path) -> None:
    found = others("GPU-b", **host(tmp_path, {"GPU-a": 1, "GPU-b": 0, "GPU-c": 10}))
    assert [Path(f).name for f in found] == ["nvidia1", "nvidia10", "nvidia7"]


def test_none_for_a_gpu_that_the_driver_does_not_name(tmp_path: Path) -> None:
    place = host(tmp_path, {"GPU-a": 1})
    assert others("MIG-a", **place) == others("", **place) == others("GPU-", **place) == []


def test_none_without_a_driver(tmp_path: Path) -> None:
    assert others("GPU-a", driver=tmp_path / "no", devices=tmp_path) == []

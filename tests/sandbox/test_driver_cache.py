"""Triton's driver is built once for all runners of a zygote."""

from __future__ import annotations

from pathlib import Path

from kbx_env.sandbox import driver_cache


def test_the_first_runner_builds_and_the_others_copy(tmp_path: Path) -> None:
    built: list[str] = []

    def runner(name: str) -> None:
        cache = tmp_path / name

        def build() -> None:
            if not (cache / "key" / "utils.so").exists():
                built.append(name)
                (cache / "key").mkdir(parents=True)
                (cache / "key" / "utils.so").write_text("driver")

        driver_cache.kept(str(cache), str(tmp_path / "driver"), build)
        assert (cache / "key" / "utils.so").read_text() == "driver"

    for name in ("a", "b", "c"):
        runner(name)
    assert built == ["a"]
    (tmp_path / "a" / "key" / "utils.so").write_text("changed by a submission")
    runner("d")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "d", "driver"]


def test_a_runner_that_builds_nothing_leaves_nothing(tmp_path: Path) -> None:
    driver_cache.kept(str(tmp_path / "cache"), str(tmp_path / "driver"), lambda: None)
    assert not (tmp_path / "driver").exists()

"""A runner's cache of compiled kernels keeps what Triton's own keeps, in fewer steps."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.cache import FileCacheManager, get_cache_manager

from kbx_env.sandbox import compile_cache


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of Triton's cache, which is a runner's in this test."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.cache, "manager_class", None)
    compile_cache.install()
    return tmp_path


@pytest.mark.parametrize("data", [b"\x00cubin", "ttir = 1 µs", 12])
def test_it_keeps_what_tritons_own_keeps(cache: Path, data: object) -> None:
    ours, own = get_cache_manager("0" * 64), FileCacheManager("own")
    assert isinstance(ours, compile_cache.RunnerCache)
    kept = {name: Path(manager.put(data, "k.ttir")).read_bytes() for name, manager in (("ours", ours), ("own", own))}
    assert kept["ours"] == kept["own"]
    paths = {"k.ttir": str(ours.get_file("k.ttir"))}
    ours.put_group("k.json", paths)
    assert ours.get_group("k.json") == paths
    assert sorted(os.listdir(ours.cache_dir)) == ["__grp__k.json", "k.ttir"]


def test_who_has_opened_a_file_keeps_it_when_it_is_put_again(cache: Path) -> None:
    # A launcher that is loaded must not change: the process would die.
    manager = get_cache_manager("0" * 64)
    with open(manager.put("a long text", "k.so")) as loaded:
        assert Path(manager.put("short", "k.so")).read_text() == "short"
        assert loaded.read() == "a long text"
    assert os.listdir(manager.cache_dir) == ["k.so"]


def test_threads_that_put_the_same_file_leave_it_whole(cache: Path) -> None:
    manager = get_cache_manager("0" * 64)
    data = b"launcher" * 20_000

    def put(turn: int) -> bool:
        return all(Path(manager.put(data, "k.so")).read_bytes() == data for _ in range(20))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(put, range(8)))
    assert os.listdir(manager.cache_dir) == ["k.so"]


HOOK = """
import os, sys
from pathlib import Path
import triton
from kbx_env.sandbox import compile_cache, firewall, limits
folder = sys.argv[1]
triton.knobs.cache.dir = folder
compile_cache.install()
log = firewall.Log()
limits.watch(log, folder, lambda: True)
manager = triton.runtime.cache.get_cache_manager("0" * 64)
for i in range(2 * limits.WRITES):
    manager.put("text", f"k{i}")
print(len(log.denied))
for i in range(limits.WRITES):
    os.close(os.open(os.path.join(folder, f"own{i}"), os.O_WRONLY | os.O_CREAT))
print(len(log.denied))
for name in (os.path.join(folder, "more"), os.path.join(folder, "..", "outside")):
    try:
        os.open(name, os.O_WRONLY | os.O_CREAT)
    except firewall.PolicyViolation as e:
        print(e)
try:
    manager.put("text", "../../outside")
except firewall.PolicyViolation as e:
    print(e)
"""
"""A process whose every write is checked as that of a submission."""


def test_the_files_of_the_compiler_do_not_count_as_writes_of_the_submission(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    ran = subprocess.run([sys.executable, "-c", HOOK, str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    none, own, more, outside, by_cache = ran.stdout.splitlines()
    assert (none, own) == ("0", "0"), "neither the compiler's files nor those that a submission may write are refused"
    assert "more than 64 files" in more and "write to" in outside and "write to" in by_cache


@given(data=st.binary(max_size=200), most=st.integers(1, 50))
def test_a_file_is_whole_where_the_system_writes_less_than_it_is_given(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(tmp_path_factory.mktemp("cache")))
        write = os.write
        patch.setattr(os, "write", lambda file, part: write(file, part[:most]))
        assert Path(compile_cache.RunnerCache("key").put(data, "k.cubin")).read_bytes() == data

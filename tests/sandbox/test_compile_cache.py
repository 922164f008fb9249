"""A runner's cache of compiled kernels keeps what Triton's own keeps, in fewer steps."""

from __future__ import annotations

import os
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


@given(data=st.binary(max_size=200), most=st.integers(1, 50))
def test_a_file_is_whole_where_the_system_writes_less_than_it_is_given(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(tmp_path_factory.mktemp("cache")))
        write = os.write
        patch.setattr(os, "write", lambda file, part: write(file, part[:most]))
        assert Path(compile_cache.RunnerCache("key").put(data, "k.cubin")).read_bytes() == data

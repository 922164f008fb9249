"""A runner's cache of compiled kernels keeps what Triton's own keeps: kernels in memory, libraries in fewer steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton import language as tl
from triton.compiler import ASTSource, compiler
from triton.runtime.cache import FileCacheManager, get_cache_manager

from kbx_env.sandbox import compile_cache, specialised
from kbx_env.sandbox.fake_cuda.driver import TARGETS


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of Triton's cache, which is a runner's in this test."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.cache, "manager_class", None)
    monkeypatch.setattr(compiler, "Path", Path)
    compile_cache.install()
    return tmp_path


@pytest.mark.parametrize("data", [b"\x00cubin", "ttir = 1 µs", 12])
@pytest.mark.parametrize("name", ["k.ttir", "k.so"])
def test_it_keeps_what_tritons_own_keeps(cache: Path, data: object, name: str) -> None:
    ours, own = get_cache_manager("0" * 64), FileCacheManager("own")
    assert isinstance(ours, compile_cache.RunnerCache)
    assert not ours.has_file(name) and ours.get_file(name) is None and ours.get_group("k.json") is None
    paths = {manager: manager.put(data, name) for manager in (ours, own)}
    assert ours.has_file(name) and paths[ours] == os.path.join(ours.cache_dir, name)
    assert Path(str(ours.get_file(name))).read_bytes() == Path(paths[own]).read_bytes()


def test_a_kernel_is_found_again_without_files(cache: Path) -> None:
    manager = get_cache_manager("0" * 64)
    group = {name: manager.put(text, name) for name, text in (("k.ttir", "ttir"), ("k.json", "{}"))}
    manager.put_group("k.json", group)
    assert get_cache_manager("0" * 64).get_group("k.json") == group and get_cache_manager("1" * 64).get_group("k.json") is None
    assert not os.listdir(cache)
    assert {name: compiler.Path(path).read_text() for name, path in group.items()} == {"k.ttir": "ttir", "k.json": "{}"}
    assert compiler.Path(__file__) == Path(__file__)


@triton.jit
def _double(x, y, n, B: tl.constexpr):
    e = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + e, 2 * tl.load(x + e, mask=e < n), mask=e < n)


def test_files_of_a_group_that_are_on_the_disk_are_found_too(cache: Path) -> None:
    manager = get_cache_manager("0" * 64)
    group = {name: manager.put("text", name) for name in ("k.custom", "k.json")}
    manager.put_group("k.json", group | {"k.gone": str(cache / "k.gone")})
    assert manager.get_group("k.json") == group


def test_files_that_somebody_wants_to_see_are_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dump = tmp_path_factory.mktemp("dump")
    monkeypatch.setattr(triton.knobs.cache, "dump_dir", str(dump))
    assert Path(compile_cache.RunnerCache("key", dump=True).put("text", "k.ttir")) == dump / "key" / "k.ttir"
    assert (dump / "key" / "k.ttir").read_text() == "text" and not os.listdir(cache)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], tuple[Any, bool]]:
    """Return a function that compiles a kernel with a folder of that name and tells whether it was found in the cache."""
    source = ASTSource(_double, {"x": "*fp32", "y": "*fp32", "n": "i32", "B": "constexpr"}, {(3,): 256})
    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: hits.append(about["cache_hit"]))
    monkeypatch.setattr(triton.knobs.cache, "manager_class", None)
    monkeypatch.setattr(compiler, "Path", Path)
    monkeypatch.setattr(compiler, "ir", compiler.ir)

    def compiled_in(folder: str) -> tuple[Any, bool]:
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / folder))
        return triton.compile(source, target=TARGETS["sm_90"]), hits[-1]

    return compiled_in


@pytest.mark.parametrize("contexts", [False, True])
def test_a_kernel_compiled_without_files_has_the_same_texts_and_metadata(
    compiled: Callable[[str], tuple[Any, bool]], tmp_path: Path, contexts: bool
) -> None:
    own, _ = compiled("own")
    compile_cache.install()
    if contexts:
        specialised.keep_contexts()
    (first, found), (again, found_again) = compiled("ours"), compiled("ours")
    assert (found, found_again) == (False, True)
    assert set(own.asm) >= {"ttir", "ttgir", "llir", "ptx", "cubin"}
    assert dict(own.asm) == dict(first.asm) == dict(again.asm)
    assert own.metadata == first.metadata == again.metadata
    assert first.metadata_group == again.metadata_group and not os.path.exists(tmp_path / "ours")


def test_the_ttir_of_a_kernel_can_be_compiled_by_its_path(compiled: Callable[[str], tuple[Any, bool]]) -> None:
    compile_cache.install()
    specialised.keep_contexts()
    first, _ = compiled("ours")
    path = next(path for name, path in first.metadata_group.items() if name.endswith(".ttir"))
    assert triton.compile(path, target=TARGETS["sm_90"]).asm["ptx"].count("st.global") == first.asm["ptx"].count("st.global") > 0


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
    manager.put("text", f"k{i}.so")
    manager.get_file(os.path.basename(manager.put("text", f"k{i}.json")))
print(len(log.denied))
for i in range(limits.WRITES):
    os.close(os.open(os.path.join(folder, f"own{i}"), os.O_WRONLY | os.O_CREAT))
print(len(log.denied))
for name in (os.path.join(folder, "more"), os.path.join(folder, "..", "outside")):
    try:
        os.open(name, os.O_WRONLY | os.O_CREAT)
    except firewall.PolicyViolation as e:
        print(e)
for name in ("../../outside", "../../outside.json"):
    try:
        manager.put("text", name)
        manager.get_file(name)
    except firewall.PolicyViolation as e:
        print(e)
"""
"""A process whose every write is checked as that of a submission."""


def test_the_files_of_the_compiler_do_not_count_as_writes_of_the_submission(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    ran = subprocess.run([sys.executable, "-c", HOOK, str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    none, own, more, outside, by_cache, from_memory = ran.stdout.splitlines()
    assert (none, own) == ("0", "0"), "neither the compiler's files nor those that a submission may write are refused"
    assert "more than 64 files" in more and "write to" in outside and "write to" in by_cache
    assert "write to" in from_memory


@given(data=st.binary(max_size=200), most=st.integers(1, 50))
def test_a_file_is_whole_where_the_system_writes_less_than_it_is_given(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(tmp_path_factory.mktemp("cache")))
        write = os.write
        patch.setattr(os, "write", lambda file, part: write(file, part[:most]))
        assert Path(compile_cache.RunnerCache("key").put(data, "k.so")).read_bytes() == data

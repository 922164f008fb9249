"""Numbers found in a kernel's source, and changed there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kbx_env.baselines.search.knobs import KINDS, knobs_of, with_knobs

from kbx_env.errors import UnknownName, UsageError
from kbx_env.spec.catalog import expert_source, task_ids

HEAD = """# é: bytes are not characters
import triton
import triton.language as tl

@triton.jit
def _k(x, n, BLOCK: tl.constexpr, WIDE: tl.constexpr, OTHER: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + 64
    also = tl.program_id(1) * OTHER + tl.arange(0, WIDE)

"""
EXPERTS = [t for t in task_ids() if expert_source(t) is not None]


def found(body: str) -> dict[str, tuple[str, int, int]]:
    return {k.name: (k.kind, k.value, len(k.spots)) for k in knobs_of(HEAD + body)}


def test_launch_arguments_and_names() -> None:
    body = "def f(x, n):\n    BM = 64 if n > 512 else 32\n    _k[(n,)](x, n, BLOCK=BM, num_warps=4, num_stages=3)\n"
    assert found(body) == {
        "f.BM@11": ("block", 64, 1), "f.BM@11.2": ("block", 32, 1), "_k.num_warps@12": ("warps", 4, 1),
        "_k.num_stages@12": ("stages", 3, 1),
    }  # fmt: skip


def test_thresholds_sizes_and_the_device_side_are_no_knobs() -> None:
    assert found("def f(x, n):\n    m = 128\n    BLOCK = triton.next_power_of_2(n)\n    return x[:64], n > 1024\n") == {}
    assert found("BLOCK = 96\nTILE = True\nBM = 0x40\n") == {}


def test_a_block_and_the_grid_that_divides_by_it_change_together() -> None:
    source = HEAD + "def f(x, n):\n    _k[(triton.cdiv(n, 1024),)](x, n, BLOCK=1024, WIDE=128)\n"
    changed = with_knobs(source, {"_k.BLOCK@11": 256})
    assert "cdiv(n, 256)" in changed and "BLOCK=256, WIDE=128" in changed
    # Now both are 256, and still only the grid's own block moves with it.
    changed = with_knobs(with_knobs(source, {"_k.WIDE@11": 1024}), {"_k.BLOCK@11": 512})
    assert "cdiv(n, 512)" in changed and "BLOCK=512, WIDE=1024" in changed


def test_a_grid_behind_a_name_is_followed() -> None:
    source = HEAD + "def f(x, n):\n    tiles = triton.cdiv(n, 512)\n    grid = (tiles,)\n    _k[grid](x, n, BLOCK=512)\n"
    assert "cdiv(n, 2048)" in with_knobs(source, {"_k.BLOCK@13": 2048})


@pytest.mark.parametrize("grid", ["(n + 1023) // 1024", "triton.cdiv(n, 512)"])
def test_a_block_whose_grid_is_not_understood_stays(grid: str) -> None:
    assert found(f"def f(x, n):\n    _k[({grid},)](x, n, BLOCK=1024, num_warps=8)\n") == {"_k.num_warps@11": ("warps", 8, 1)}


def test_tables_and_configurations() -> None:
    body = (
        "def f(n):\n    tiles = ((128, 64, 8), (32, 32, 4)) if n else ((16, 16, 1),)\n"
        "    for BM, BN, warps in tiles:\n        pass\n"
        "C = [triton.Config({'BLOCK': 256}, num_warps=8, num_stages=2)]\n"
    )
    kinds = [(k.kind, k.value) for k in knobs_of(HEAD + body)]
    assert kinds == [
        ("block", 128), ("block", 64), ("warps", 8), ("block", 32), ("block", 32), ("warps", 4), ("block", 16), ("block", 16),
        ("warps", 1), ("block", 256), ("warps", 8), ("stages", 2),
    ]  # fmt: skip


def test_choices_surround_the_present_value() -> None:
    body = "BM, BN = 64, 4\ndef f(x):\n    _k[(1,)](x, num_warps=32, num_stages=2, GROUP=8)\n"
    assert {k.name: k.choices for k in knobs_of(HEAD + body)} == {
        "module.BM@10": (16, 32, 64, 128, 256, 512), "module.BN@10": (4, 8, 16, 32),
        "_k.num_warps@12": (1, 2, 4, 8, 16, 32), "_k.num_stages@12": (1, 2, 3, 4, 5), "_k.GROUP@12": (1, 2, 4, 8, 16, 32, 64),
    }  # fmt: skip


def test_bad_settings_are_named() -> None:
    source = HEAD + "BLOCK = 64\n"
    with pytest.raises(UnknownName, match="module.BLOCK@10"):
        with_knobs(source, {"module.BLOK@10": 64})
    for value in (48, 1 << 20, True, 64.0):
        with pytest.raises(UsageError, match="accepted: 16, 32"):
            with_knobs(source, {"module.BLOCK@10": value})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="no Python"):
        knobs_of("def f(:\n")


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    knobs_of(f"BLOCK = 64\nopen({str(mark)!r}, 'w')\n")
    assert not mark.exists()


def test_line_ends_stay() -> None:
    assert with_knobs("A = 1\r\nBLOCK = 64 # é\r\n", {"module.BLOCK@2": 128}) == "A = 1\r\nBLOCK = 128 # é\r\n"


def test_almost_every_expert_has_knobs() -> None:
    having = [t for t in EXPERTS if knobs_of(expert_source(t) or "")]
    assert len(having) >= 0.95 * len(EXPERTS)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_choice_comes_back(data: st.DataObject) -> None:
    """Of every kernel of the project: the present values change nothing, any others are found again, and nothing else moves."""
    source = expert_source(data.draw(st.sampled_from(EXPERTS))) or ""
    knobs = knobs_of(source)
    assert len({k.name for k in knobs}) == len(knobs)
    assert all(k.kind in KINDS and k.value in k.choices for k in knobs)
    assert with_knobs(source, {k.name: k.value for k in knobs}) == source
    if not knobs:
        return
    some = data.draw(st.lists(st.sampled_from(knobs), unique=True, min_size=1))
    chosen = {k.name: data.draw(st.sampled_from(k.choices)) for k in some}
    changed = with_knobs(source, chosen)
    after = {k.name: k for k in knobs_of(changed)}
    assert {n: k.value for n, k in after.items()} == {k.name: chosen.get(k.name, k.value) for k in knobs}
    assert [len(after[k.name].spots) for k in knobs] == [len(k.spots) for k in knobs]
    kept, spots = changed.encode(), [s for k in after.values() for s in k.spots]
    for start, end in sorted(spots, reverse=True):
        kept = kept[:start] + b"?" + kept[end:]
    was, spots = source.encode(), [s for k in knobs for s in k.spots]
    for start, end in sorted(spots, reverse=True):
        was = was[:start] + b"?" + was[end:]
    assert kept == was
    ast.parse(changed)

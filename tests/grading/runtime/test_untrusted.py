"""What a runner claims of a build is read with care."""

from __future__ import annotations

import pytest

from kbx_env.grading.runtime.untrusted import build
from kbx_env.protocol import wire

ROW = {"kernel": "k", "target": "sm_90", "ok": True}


@pytest.mark.parametrize(("claimed", "read"), [(8, 8), (12, 12), (None, None), (0, None), (64, None), (1 << 40, None)])
def test_impossible_warps_are_not_known(claimed: int | None, read: int | None) -> None:
    assert build({**ROW, "warps": claimed}).warps == read and build(ROW).warps is None


def test_what_is_no_number_is_refused() -> None:
    for claimed in ("4", 4.0, True, -1):
        with pytest.raises(wire.WireError):
            build({**ROW, "warps": claimed})

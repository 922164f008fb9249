"""What the recorder tells the engine about memory that the host code takes and lets go."""

from __future__ import annotations

import math
from typing import Any

import torch

from kbx_env.sandbox.firewall import Log
from kbx_env.sandbox.recorder import Recorder


class _Gone:
    def expired(self) -> bool:
        return True


def test_storages_below_a_new_one_are_let_go_first() -> None:
    """A cache that is emptied in a call leaves its memory to a tensor that may lie across several of its storages."""
    recorder = Recorder(Log(math.inf), lambda request: [])
    recorder.begin(True, {})
    fresh = torch.empty(64)
    gone: Any = _Gone()
    inside = fresh.data_ptr() + 64
    recorder._weak[inside] = gone
    recorder.view(fresh)
    assert recorder.steps == [["free", inside], ["alloc", fresh.data_ptr(), 256]]


def test_no_later_tensor_takes_an_address_of_the_module_that_the_engine_has_not_seen() -> None:
    """Steps of the module's execution go with the first call: a tensor that was freed meanwhile must not be allocated twice."""
    recorder = Recorder(Log(math.inf), lambda request: [], allow=True, values=True)
    made = torch.empty(6)
    base = made.data_ptr()
    recorder.view(made)
    del made
    recorder.begin(True, {})
    assert base in recorder._known and not recorder.take()["free"]
    recorder.begin(True, {})
    assert recorder.take()["free"] == [base]

"""The process of a zygote: started without waiting, warm on request, gone when it is closed at any time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kbx_env.errors import SandboxError
from kbx_env.grading.runtime.processes import SandboxProcesses
from kbx_env.grading.runtime.zygote_client import Zygote
from kbx_env.grading.runtime.zygote_process import ZygoteProcess


def test_one_that_nobody_needed_is_closed_at_once() -> None:
    began = time.monotonic()
    process = ZygoteProcess()
    process.close()
    process.close()  # closing twice does no harm
    assert process.process.poll() is not None and not Path(process.folder).exists()
    assert time.monotonic() - began < 5.0, "it is not waited for while it imports torch"


def test_a_started_one_becomes_the_zygote_of_a_grader() -> None:
    started = ZygoteProcess()
    processes = SandboxProcesses(started)
    processes.start()  # there is one already
    zygote = processes.zygote()
    assert zygote.alive and zygote._process is started.process and processes.zygote() is zygote
    processes.close()
    assert started.process.poll() is not None and not Path(started.folder).exists()


def test_one_that_died_before_it_was_warm_is_an_error() -> None:
    started = ZygoteProcess()
    started.process.kill()
    with pytest.raises(SandboxError, match="did not start"):
        Zygote(started)
    assert not Path(started.folder).exists()

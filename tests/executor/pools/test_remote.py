"""The pool that grades by a service: what it asks, and what it makes of a service that fails."""

from __future__ import annotations

import pytest
from service_stand_in import StandIn

pytest.importorskip("httpx")
pytest.importorskip("tenacity")
from kbx_env.errors import UsageError
from kbx_env.executor import Executor, Request
from kbx_env.executor.pools.remote import RemotePool
from kbx_env.outcome import FaultKind, Verdict


def test_outcomes_come_as_the_service_has_them() -> None:
    client = StandIn("http://x", "secret")
    with Executor(RemotePool("http://x", client=client), attempts=1) as executor:
        requests = [Request("math/softmax", source, {"backend": "cpu"}) for source in (b"GOOD", b"\xff", b"GONE")]
        good, bad, gone = (executor.submit(request).result(10) for request in requests)
        with pytest.raises(UsageError, match="no such option"):
            executor.submit(Request("math/softmax", b"REFUSED")).result(10)
    assert good.correct and bad.verdict is Verdict.INCORRECT
    assert gone.masked and gone.fault_kind is FaultKind.WORKER_LOST and "the service failed" in gone.message
    assert client.seen[:2] == [("math/softmax", b"GOOD", {"backend": "cpu"}), ("math/softmax", b"\xff", {"backend": "cpu"})]
    assert client.closed


def test_the_backend_is_that_of_the_service() -> None:
    pool = RemotePool("http://x", client=StandIn("http://x", "secret"))
    assert pool.backend("auto") == "cpu" and pool.backend("cuda") == "cuda"
    pool.info = {}
    with pytest.raises(UsageError, match="give backend"):
        pool.backend("auto")


def test_a_service_that_cannot_be_used_is_said_at_once() -> None:
    client = StandIn("http://x", "wrong")
    with pytest.raises(UsageError, match="wrong token; start one with: kbx serve"):
        RemotePool("http://x", client=client)
    assert client.closed
    with pytest.raises(UsageError, match="at least 1"):
        RemotePool("http://x", width=0, client=client)

"""The pool that grades by a service: what it asks, and what it makes of a service that fails."""

from __future__ import annotations

import pytest
from service_stand_in import StandIn

pytest.importorskip("httpx")
pytest.importorskip("tenacity")
from kbx_env.errors import UsageError
from kbx_env.executor import Executor, Request
from kbx_env.executor.pools import remote
from kbx_env.outcome import FaultKind, Verdict


def test_outcomes_come_as_the_service_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "Client", StandIn)
    pool = remote.RemotePool("http://x", "secret")
    client = pool.client
    with Executor(pool, attempts=1) as executor:
        requests = [Request("math/softmax", source, {"backend": "cpu"}) for source in (b"GOOD", b"\xff", b"GONE")]
        good, bad, gone = (executor.submit(request).result(10) for request in requests)
        with pytest.raises(UsageError, match="no such option"):
            executor.submit(Request("math/softmax", b"REFUSED")).result(10)
    assert good.correct and bad.verdict is Verdict.INCORRECT
    assert gone.masked and gone.fault_kind is FaultKind.WORKER_LOST and "the service failed" in gone.message
    asked = {"backend": "cpu", "priority": 0}
    assert isinstance(client, StandIn) and client.closed
    assert client.seen[:2] == [("math/softmax", b"GOOD", asked), ("math/softmax", b"\xff", asked)]


def test_a_service_that_cannot_be_used_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "Client", StandIn)
    with pytest.raises(UsageError, match="wrong token"):
        remote.RemotePool("http://x", "wrong")

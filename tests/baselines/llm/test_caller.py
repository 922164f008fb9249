"""Asking: retries, limits, budgets, the record, and that nothing secret gets into it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.caller import Caller, Limits
from kbx_env.baselines.llm.chat import CallFailed, ChatRequest, Finish, Reply
from kbx_env.baselines.llm.ledger import Budget, Ledger
from kbx_env.baselines.llm.log import CallLog
from scripted import Asked, Failure, ScriptedServer
from scripted import Reply as Said

from kbx_env.errors import BudgetSpent, ModelError, UnknownName, UsageError

QUICK = Limits(concurrency=4, attempts=3, patience=0.01)


class Model:
    """Answers in this process; a list of what to say or raise, in order."""

    model = "m"

    def __init__(self, *script: Reply | Exception, delay: float = 0.0) -> None:
        self.script, self.delay = list(script), delay
        self.asked: list[ChatRequest] = []
        self.now, self.most, self.closed = 0, 0, False
        self._lock = threading.Lock()

    def complete(self, ask: ChatRequest) -> Reply:
        with self._lock:
            self.asked.append(ask)
            self.now += 1
            self.most = max(self.most, self.now)
            said = self.script.pop(0) if self.script else _reply(f"answer {len(self.asked)}")
        time.sleep(self.delay)
        with self._lock:
            self.now -= 1
        if isinstance(said, Exception):
            raise said
        return said

    def close(self) -> None:
        self.closed = True


def _reply(text: str = "yes", tokens: int | None = 10) -> Reply:
    return Reply(text, Finish.STOP, "", tokens, tokens, None, "m", 0.5)


def _ask(text: str = "?") -> ChatRequest:
    return ChatRequest(({"role": "user", "content": text},), 100)


def _busy(after: float | None = None) -> CallFailed:
    return CallFailed("rate_limit", "slow down", retryable=True, retry_after=after)


def test_it_asks_again_and_says_how_often() -> None:
    model = Model(_busy(), CallFailed("server_error", "oh", retryable=True), _reply())
    caller = Caller(model, QUICK)
    assert caller.session("p", "t", 0).ask("a", _ask()).text == "yes"
    (call,), failures = caller.ledger.log.rows(), list(caller.ledger.log.failures())
    assert call["attempts"] == 3 and [f["kind"] for f in failures] == ["rate_limit", "server_error"]
    assert [f["attempt"] for f in failures] == [1, 2]


def test_a_server_that_stays_down_is_an_error_of_its_own() -> None:
    model = Model(*[_busy() for _ in range(9)])
    with pytest.raises(ModelError, match=r"failed \(a\): rate_limit: slow down; 3 attempts"):
        Caller(model, QUICK).session("p", "t", 0).ask("a", _ask())
    assert len(model.asked) == 3


def test_what_will_not_mend_is_asked_once() -> None:
    model = Model(CallFailed("bad_request", "too long", retryable=False))
    with pytest.raises(ModelError, match="1 attempt$"):
        Caller(model, QUICK).session("p", "t", 0).ask("a", _ask())
    model = Model(CallFailed("key", "wrong", retryable=False, fatal=True))
    with pytest.raises(UsageError, match="--base-url and the key"):
        Caller(model, QUICK).session("p", "t", 0).ask("a", _ask())
    assert len(model.asked) == 1


def test_retry_after_is_kept_by_all_threads() -> None:
    model = Model(_busy(after=0.4))
    caller = Caller(model, QUICK)
    start = time.monotonic()
    first = threading.Thread(target=lambda: caller.session("p", "t", 0).ask("a", _ask()))
    first.start()
    while not model.asked or model.now:
        time.sleep(0.005)
    caller.session("p", "t", 1).ask("b", _ask())
    first.join()
    assert time.monotonic() - start >= 0.4 and len(model.asked) == 3


def test_no_more_calls_at_a_time_than_allowed() -> None:
    model = Model(delay=0.02)
    replies = Caller(model, QUICK).session("p", "t", 0).ask_all([(f"{i}", _ask(str(i))) for i in range(20)])
    assert model.most == 4 and len({r.text for r in replies}) == 20


def test_so_many_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(Model(), Limits(per_minute=2))
    session = caller.session("p", "t", 0)
    session.ask("a", _ask()), session.ask("b", _ask())
    third = caller.submit(*session._seeded("c", _ask()))
    time.sleep(0.1)
    assert not third.done()
    caller._started[0] -= 60  # a minute later
    with caller._rate:
        caller._rate.notify_all()
    assert third.result(5).text


def test_one_failure_of_several_loses_no_answer() -> None:
    model = Model(CallFailed("bad_request", "no", retryable=False))
    caller = Caller(model, Limits(concurrency=1))
    with pytest.raises(ModelError):
        caller.session("p", "t", 0).ask_all([(f"{i}", _ask(str(i))) for i in range(3)])
    assert len(list(caller.ledger.log.rows())) == 2, "what was answered is kept, and not asked again"


def test_a_recorded_call_is_not_made_again(tmp_path: Path) -> None:
    def ask(model: Model, seed: int = 0) -> str:
        ledger = Ledger()
        ledger.keep(tmp_path / "calls.sqlite")
        caller = Caller(model, QUICK, ledger, seed=seed)
        said = caller.session("p", "t", 0).ask("a", _ask("half a pair \ud800")).text
        assert caller.session("p", "t", 0).spent.calls == 1, "an answer from the record counts as spent on this task"
        ledger.close()
        return said

    first, second, other = Model(), Model(), Model(_reply("another"))
    assert ask(first) == ask(second) == "answer 1" and (len(first.asked), len(second.asked)) == (1, 0)
    assert ask(other, seed=1) == "another", "another seed is another call"


def test_seeds_differ_between_slots_samples_and_tasks_and_repeat() -> None:
    def seeds() -> list[int | None]:
        model = Model()
        caller = Caller(model, QUICK, seed=3)
        for task, sample, label in (("t", 0, "a"), ("t", 0, "b"), ("t", 1, "a"), ("u", 0, "a")):
            caller.session("p", task, sample).ask(label, _ask())
        return [a.seed for a in model.asked]

    assert seeds() == seeds() and len(set(seeds())) == 4


@pytest.mark.parametrize(
    ("budget", "calls", "says"),
    [
        (Budget(calls=3), 3, "budget of 3 calls.*--budget-calls"), (Budget(calls=0), 0, "calls"),
        (Budget(tokens=50), 3, "budget of 50 tokens"), (Budget(dollars=0.05, prices=(1000, 1000)), 3, r"budget of 0\.05 dollars"),
    ],
)  # fmt: skip
def test_a_budget_stops_asking(budget: Budget, calls: int, says: str, tmp_path: Path) -> None:
    model, ledger = Model(), Ledger(budget)
    ledger.keep(tmp_path / "calls.sqlite")
    session = Caller(model, QUICK, ledger).session("p", "t", 0)
    with pytest.raises(BudgetSpent, match=says):
        for i in range(9):
            session.ask(str(i), _ask())
    assert len(model.asked) == calls
    again = Ledger(budget)
    again.keep(tmp_path / "calls.sqlite")
    session = Caller(model, QUICK, again).session("p", "t", 0)
    with pytest.raises(BudgetSpent):
        session.ask("new", _ask())
    assert calls == 0 or session.ask("0", _ask()).text == "answer 1", "what was paid for is still there"


def test_calls_under_way_count_for_the_budget() -> None:
    model = Model(delay=0.05)
    session = Caller(model, Limits(concurrency=8), Ledger(Budget(calls=5))).session("p", "t", 0)
    with pytest.raises(BudgetSpent):
        session.ask_all([(str(i), _ask(str(i))) for i in range(20)])
    assert len(model.asked) == 5


@pytest.mark.parametrize(
    ("budget", "reply", "says"),
    [
        (Budget(tokens=50), _reply(tokens=None), "--budget-calls"),
        (Budget(dollars=1), _reply(), "--prices"),
    ],
)
def test_a_budget_that_cannot_be_held_is_said(budget: Budget, reply: Reply, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Caller(Model(reply), QUICK, Ledger(budget)).session("p", "t", 0).ask("a", _ask())


def test_the_key_reaches_neither_record_nor_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-do-not-tell-9876543210"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    said: Callable[..., Failure] = lambda _: Failure("status", 401)
    with ScriptedServer(said) as server:
        access = Access(model="m", base_url=server.base_url, limits=QUICK)
        access.ledger.keep(tmp_path / "calls.sqlite")
        with pytest.raises(UsageError) as caught:
            access.caller("p").session("p", "t", 0).ask("a", _ask())
        assert key in server.asked[0].headers["authorization"], "the server was sent it"
    chain: list[BaseException] = [caught.value]
    failure = next(iter(access.ledger.log.failures()))
    access.ledger.close()
    assert key not in str(chain[0]) and "***" in failure["text"]
    assert all(key.encode() not in p.read_bytes() for p in tmp_path.iterdir())


def test_stopping_ends_those_who_wait() -> None:
    caller = Caller(Model(_busy(after=60)), QUICK)
    job = caller.submit(*caller.session("p", "t", 0)._seeded("a", _ask()))
    time.sleep(0.1)
    caller.close()
    assert isinstance(job.exception(5), ModelError)


def test_two_hundred_requests_at_once_without_an_error() -> None:
    everybody = threading.Barrier(200, timeout=60)

    def answer(asked: Asked) -> Said:
        everybody.wait()  # nobody is answered before all have asked
        return Said(f"echo {asked.text}")

    with ScriptedServer(answer) as server:
        access = Access(model="m", base_url=server.base_url, limits=Limits(concurrency=200))
        caller = access.caller("p")
        replies = caller.session("p", "t", 0).ask_all([(str(i), _ask(str(i))) for i in range(200)])
        assert [r.text for r in replies] == [f"echo {i}" for i in range(200)]
        assert not list(caller.ledger.log.failures()) and server.most_at_once == 200
        caller.close()


def test_one_bad_minute_of_a_server_costs_nothing() -> None:
    trouble = [Failure("hang_up"), Failure("html"), Failure("truncate"), Failure("invalid_json"), Failure("status", 500),
               Failure("error_event"), Failure("status", 429, retry_after=0), Failure("truncate", clean=True)]  # fmt: skip
    with ScriptedServer([*trouble, Said("at last")]) as server:
        access = Access(model="m", base_url=server.base_url, limits=Limits(1, attempts=9, patience=0.001), stall=1)
        assert access.caller("p").session("p", "t", 0).ask("a", _ask()).text == "at last"
        assert len(list(access.ledger.log.failures())) == len(trouble)


@pytest.mark.parametrize(
    ("access", "says"),
    [
        (Access(), "--model NAME"),
        (Access(model="m"), "OPENAI_API_KEY"),
        (Access(model="m", api="anthropic"), "ANTHROPIC_API_KEY"),
        (Access(model="m", key_env="NOTHING_HERE"), "NOTHING_HERE"),
        (Access(model="m", base_url="no address"), "http"),
        (Access(model="hf:/nowhere"), "nowhere"),
    ],
)
def test_unusable_access_is_named_before_anything_is_asked(access: Access, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=says):
        access.caller("p")
    with pytest.raises(UnknownName, match="anthropic"):
        Access(model="m", api="opanai").caller("p")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "calls.sqlite").write_bytes(b"not a database at all, just text" * 40)
    with pytest.raises(UsageError, match=r"calls\.sqlite"):
        CallLog(tmp_path / "calls.sqlite")

"""A hostile submission harms neither the grader nor the host, ends in the right verdict in time, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kbx_env.rewards.compose import load_preset

from kbx_env.confinement import landlock_version
from kbx_env.grading.context import GradingContext
from kbx_env.grading.grader import Grader
from kbx_env.outcome import Fault, Outcome, Verdict
from kbx_env.spec.catalog import expert_source

TASK = "activation/gelu_fp16"
EXPERT = expert_source(TASK)
WALL = 20.0
SHORT = 2.0
# Most of what a submission may have, taken without touching a page of it: to fill all of it takes a quarter of a minute.
# The rest is filled, and "too much at once" shows how much all of it is.
ROOM = "import mmap\nroom = mmap.mmap(-1, 5 << 30)\n"
REWARD = load_preset("default")
DEAD, LATE, NO = Verdict.RUNTIME_ERROR, Verdict.TIMEOUT, Verdict.REJECTED


def hostile(grader: Grader, body: str, *, top: str = "", wall: float = WALL) -> Outcome:
    """Our own right kernel, with something hostile before the call."""
    lines = "\n    ".join(body.splitlines())
    source = EXPERT.replace(f"def {TASK.split('/')[1]}(", "def _honest(")
    source += (
        f"\n\n{top}\n\ndef gelu_fp16(input, approximate='none'):\n    {lines}\n    return _honest(input, approximate)\n"
    )
    return grader.grade(TASK, source, backend="cpu", targets=(), wall=wall)


@pytest.fixture(scope="module")
def started(grader: Grader) -> Grader:
    """After its first grading: what it opens once it has opened. Each test ends with another grading, so one is enough."""
    grader.grade(TASK, EXPERT, backend="cpu", targets=())
    return grader


@pytest.fixture
def quiet(started: Grader) -> Iterator[Grader]:
    """The next grading is unharmed, in time, and nothing is left of this one."""
    grader = started
    before = _traces(grader)
    yield grader
    after = grader.grade(TASK, EXPERT, backend="cpu", targets=())
    assert after.correct, after.message
    left = _traces(grader)
    assert left["processes"] == before["processes"]
    assert left["files"] == before["files"]
    assert left["descriptors"] - before["descriptors"] <= 1, "fewer: something of an earlier test was collected meanwhile"
    for _ in range(1200):  # those of other programs come and go; what a submission leaves stays
        if set(os.listdir("/dev/shm")) <= before["shm"]:
            break
        time.sleep(0.05)
    assert set(os.listdir("/dev/shm")) <= before["shm"]


@pytest.fixture
def unlocked(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> Grader:
    """Without the audit hook. Runners are told so one by one, so the zygote, which takes seconds to start, is the shared one."""
    monkeypatch.setattr(grader, "without", Grader(without=["screen", "lockdown"]).without)
    return grader


def _traces(grader: Grader) -> dict[str, Any]:
    root = grader.zygote()
    for _ in range(500):  # a killed process takes a moment; what other tests keep running (wandb's) is not waited for
        if not _below(root._process.pid):
            break
        time.sleep(0.02)
    return {
        "processes": len(_below(os.getpid())),
        "files": len(os.listdir(root._folder)), "shm": set(os.listdir("/dev/shm")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }  # fmt: skip


def _below(pid: int) -> list[int]:
    """Processes that descend from one, without those from which a zygote forks runners."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":  # gone, and collected with the next request
                    parents[int(entry)] = int(parent)
            except OSError:
                continue
    found, wave = [], {pid}
    while wave:
        wave = {p for p, q in parents.items() if q in wave}
        found += wave
    return [p for p in found if _name(p) != "kbx-closed"]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("name", "body", "verdict"),
    [
        ("endless loop", "while True: pass", LATE),
        ("sleep", "import time; time.sleep(60)", LATE),
        ("recursion", "f = lambda n: f(n + 1)\nf(0)", DEAD),
        ("deep C recursion", "x = []\nfor _ in range(10**6): x = [x]\nrepr(x)", DEAD),
        ("exit", "raise SystemExit(0)", DEAD),
        ("exit at once", "import sys\nsys.modules['os']._exit(0)", DEAD),
        ("segmentation fault", "torch.empty(0).as_strided((1 << 20,), (1 << 30,)).fill_(1.0)", DEAD),
        ("memory", ROOM + "x = [bytearray(1 << 28) for _ in range(1000)]", DEAD),
        ("memory of tensors", ROOM + "x = [torch.ones(1 << 28) for _ in range(100)]", DEAD),
        ("too much at once", "import mmap\nmmap.mmap(-1, 7 << 30)", DEAD),
        ("endless list", ROOM + "x = []\nwhile True: x += [0] * (1 << 20)", DEAD),
        ("fork", "import sys\nsys.modules['os'].fork()", NO),
        ("fork bomb", "import sys\nwhile True: sys.modules['os'].fork()", NO),
        ("spawn", "import sys\nsys.modules['subprocess'].Popen(['sleep', '60'])", NO),
        ("shell", "import sys\nsys.modules['os'].system('true')", NO),
        ("kill the grader", "import sys\no = sys.modules['os']\no.kill(o.getppid(), 9)", NO),
        ("kill the group", "import sys\nsys.modules['os'].killpg(0, 15)", NO),
        ("write outside", "import sys\no = sys.modules['io']\no.open('/tmp/kbx-was-here', 'w')", NO),
        ("disk", "import sys\no = sys.modules['io']\nfor k in range(99):\n    o.open(f'{k}', 'w').write('x' * (1 << 22))", NO),
        ("one large file", "import sys\nf = sys.modules['io'].open('x', 'w')\nwhile True: f.write('x' * (1 << 20))", DEAD),
        ("socket", "import sys\ns = sys.modules['socket'].socket()\ns.connect(('127.0.0.1', 80))", NO),
        ("socket to bind", "import sys\ns = sys.modules['socket'].socket()\ns.bind(('127.0.0.1', 0))", NO),
        ("another interpreter", "import sys\no = sys.modules['os']\no.execv(sys.executable, ['x'])", NO),
        ("ctypes", "import sys\nsys.modules['ctypes'].CDLL(None).abort()", NO),
        ("new audit hook", "import sys\nsys.addaudithook(lambda *a: None)", NO),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) < 30 and "\n" not in v else "",
)  # fmt: skip
def test_harm(quiet: Grader, name: str, body: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the text gives away is refused before it runs; here it runs.
    monkeypatch.setattr(GradingContext, "lacks", lambda self, layer: layer == "screen")
    start = time.monotonic()
    outcome = hostile(quiet, body, wall=SHORT if verdict is LATE else WALL)
    if verdict is LATE:
        assert time.monotonic() - start < SHORT + 2.0 + 1.5, "the limit, two seconds, and the start of two processes"
    # A machine under load may need the whole limit to fill the memory that is allowed.
    accepted = (DEAD, LATE) if "memory" in name or "list" in name or "file" in name else (verdict,)
    assert outcome.verdict in accepted, (outcome.verdict, outcome.message)
    if outcome.verdict is DEAD and ("memory" in name or "list" in name or "much" in name):
        assert re.search("memory|died", outcome.message, re.IGNORECASE), outcome.message
    assert outcome.fault is not Fault.INFRA
    assert not os.path.exists("/tmp/kbx-was-here")


@pytest.mark.parametrize(
    "attempt",
    [
        "sys.modules['os'].kill(sys.modules['os'].getppid(), 0)",
        "sys.modules['os'].fork()",
        "sys.modules['io'].open('/tmp/kbx-was-here', 'w')",
        "torch.relu(input)",
        "input.numpy()",
        "__import__('numba')",
    ],
)
def test_an_attempt_costs_the_reward_though_it_was_blocked_and_the_kernel_is_right(
    grader: Grader, attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradingContext, "lacks", lambda self, layer: layer == "screen")
    outcome = hostile(grader, f"import sys\ntry:\n    {attempt}\nexcept BaseException:\n    pass")
    assert outcome.verdict is NO and outcome.violations and REWARD(outcome) == 0.0, outcome.message
    assert outcome.cases is None or outcome.cases.passed == outcome.cases.total


def test_the_log_cannot_be_taken_back(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Denials leave the process before the exception is raised: emptying the list in memory comes too late."""
    monkeypatch.setattr(GradingContext, "lacks", lambda self, layer: layer == "screen")
    clear = (
        "import sys\ntry:\n    torch.relu(input)\nexcept Exception as e:\n    frame = e.__traceback__\n"
        "    while frame:\n        for v in frame.tb_frame.f_locals.values():\n"
        "            if hasattr(v, 'denied'): v.denied.clear()\n        frame = frame.tb_next"
    )
    outcome = hostile(grader, clear)
    assert outcome.verdict is NO and outcome.violations[0].rule == "torch_compute"


def test_a_gigabyte_on_stdout_goes_nowhere(quiet: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradingContext, "lacks", lambda self, layer: layer == "screen")
    outcome = hostile(quiet, "pass", top="import sys\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))")
    assert outcome.correct, outcome.message


def test_a_closed_log_is_tampering(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradingContext, "lacks", lambda self, layer: layer == "screen")
    close = (
        "import sys\no = sys.modules['os']\nfor fd in range(3, 64):\n    try:\n"
        "        if 'pipe' in o.readlink(f'/proc/self/fd/{fd}'): o.close(fd)\n    except OSError:\n        pass"
    )
    outcome = hostile(grader, close)
    assert outcome.verdict is NO and "silent" in outcome.message


def test_a_refusal_does_not_hand_over_what_refuses(grader: Grader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The traceback of a refusal leads to the frame of the audit hook: nothing found there can be emptied to disarm it."""
    monkeypatch.setattr(grader, "without", Grader(without=["screen", "kernel"]).without)
    file = tmp_path / "written"
    write = f"""
try:
    open({str(file)!r}, "w")
except BaseException as e:
    step = e.__traceback__
    while step is not None:
        for held in step.tb_frame.f_locals.values():
            if isinstance(held, (dict, list, set)):
                held.clear()
        step = step.tb_next
with open({str(file)!r}, "w") as f:
    f.write("x")
"""
    outcome = hostile(grader, write)
    assert outcome.verdict is NO and not file.exists()


@pytest.mark.skipif(not landlock_version(), reason="needs a kernel with Landlock")
def test_the_kernel_holds_what_python_lets_through(unlocked: Grader) -> None:
    """Without the audit hook: no writing outside, no reading of the grader's memory, no signals, no network."""
    attempts = {
        "write": "io.open('/tmp/kbx-was-here', 'w')",
        "memory": "io.open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
        "environment": "io.open(f'/proc/{os.getppid()}/environ', 'rb').read(1)",
        "shared memory": "io.open('/dev/shm/kbx-was-here', 'w')",
        "connect": "socket.socket().connect(('127.0.0.1', 1))",
        "remove": "os.unlink(sys.executable)",
    } | ({"signal": "os.kill(os.getppid(), 0)"} if landlock_version() >= 6 else {})
    lines = "\n".join(
        f"try:\n    {line}\n    raise SystemError('{name} was possible')\nexcept OSError as e:\n    assert e.errno in (1, 13), e"
        for name, line in attempts.items()
    )
    modules = "import sys\nos, io, socket = (sys.modules[n] for n in ('os', 'io', 'socket'))\n"
    outcome = hostile(unlocked, modules + lines)
    assert outcome.correct, outcome.message


def test_what_a_submission_leaves_behind_is_killed(unlocked: Grader) -> None:
    """A grandchild in a session of its own, whose parent has gone."""
    leave = (
        "import sys\no = sys.modules['os']\nif not o.fork():\n    o.setsid()\n    if not o.fork():\n"
        "        sys.modules['time'].sleep(300)\n    o._exit(0)"
    )
    outcome = hostile(unlocked, "pass", top=leave)
    assert outcome.correct, outcome.message
    unlocked.grade(TASK, EXPERT, backend="cpu", targets=())
    for _ in range(100):
        left = _below(unlocked.zygote()._process.pid)
        if not left:
            break
        time.sleep(0.02)
    assert not left

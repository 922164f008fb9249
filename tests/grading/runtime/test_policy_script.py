"""A policy's own test runs like any script, and harms nobody: bounded, confined, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbx_env.confinement import landlock_version
from kbx_env.errors import UnknownName, UsageError
from kbx_env.grading.runtime import policy_script
from kbx_env.grading.runtime.policy_script import CHARACTERS, ScriptResult, run_script
from kbx_env.sandbox import script as child

NAME = f"hostile{os.getpid()}"
"""By which a test finds its scripts' processes, and not those of tests beside it."""
SLACK = 8.0
"""Seconds: far below what the scripts here would take by themselves."""
LANDLOCK = pytest.mark.skipif(not landlock_version(), reason="needs a kernel with Landlock")
KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def _add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)

def add(x, y):
    out = torch.empty_like(x)
    _add[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out
"""
TEST = """
import torch
from kernel import add

x, y = (torch.randn(1000, device="DEVICE") for _ in range(2))
torch.testing.assert_close(add(x, y), torch.add(x, y) + EXTRA)
print("they agree")
"""


def run(source: str, wall: float = 10.0, **more: str) -> ScriptResult:
    """Run one script; whatever it does, it ends in time, and a machine under load has some more of it."""
    began = time.monotonic()
    result = run_script({"test.py": source, **more}, "test.py", wall=wall)
    assert time.monotonic() - began < wall + SLACK
    return result


def _alive(word: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            comm, _, rest = Path("/proc", name, "stat").read_text().rpartition(")")
            if word in comm and rest.split()[0] not in "ZX":  # who is dead waits for a container's first process
                found.append(int(name))
        except OSError:
            continue
    return found


def _until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test: no folder, no named process and no shared memory remains."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the first use of CUDA opens descriptors for good
    before, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    yield tmp_path
    assert not list(tmp_path.glob("kbx-script-*"))
    assert not _alive(NAME)
    with contextlib.suppress(AssertionError):  # other tests' come and go
        _until(lambda: set(os.listdir("/dev/shm")) <= before, 5)
    assert set(os.listdir("/dev/shm")) <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.fixture(params=["namespaces", "none"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a process namespace where the machine has one, and as on a machine that has none."""
    monkeypatch.setattr(policy_script, "_NAMESPACES", request.param == "namespaces")
    return str(request.param)


def test_a_kernel_that_is_right() -> None:
    files = {"kernel.py": KERNEL, "test_kernel.py": TEST.replace("DEVICE", "cpu").replace("EXTRA", "0")}
    result = run_script(files, "test_kernel.py")
    assert result.passed and result.status == 0, result.stderr
    assert result.stdout == "they agree\n"


def test_a_kernel_that_is_wrong() -> None:
    files = {"kernel.py": KERNEL, "test_kernel.py": TEST.replace("DEVICE", "cpu").replace("EXTRA", "1")}
    result = run_script(files, "test_kernel.py")
    assert result.status == 1 and not result.passed
    assert "Tensor-likes are not close" in result.stderr and 'File "test_kernel.py", line 6' in result.stderr


@pytest.mark.gpu
def test_a_kernel_on_the_gpu() -> None:
    files = {"kernel.py": KERNEL, "test_kernel.py": TEST.replace("DEVICE", "cuda").replace("EXTRA", "0")}
    result = run_script(files, "test_kernel.py", backend="cuda", wall=120)
    assert result.passed, result.stderr


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("assert 0, 'no'", 1),
        ("this is no Python", 1),
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
        ("import ctypes; ctypes.string_at(0)", -11),
    ],
)
def test_status(source: str, status: int) -> None:
    assert run(source).status == status


def test_status_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_script, "_NAMESPACES", False)
    assert [run(s).status for s in ("", "import os; os.kill(os.getpid(), 9)", "raise SystemExit(4)")] == [0, -9, 4]


def test_it_runs_like_any_script() -> None:
    result = run(
        "import atexit, os, pickle, sys, tempfile, threading\n"
        "assert __name__ == '__main__' and sys.argv == ['test.py'] and 'kbx_env' not in sys.modules\n"
        "assert sorted(os.listdir()) == ['other.py', 'test.py'] and os.path.samefile(__file__, 'test.py')\n"
        "assert not {'main', 'compile', 'kbx_env'} & set(globals())\n"
        "class C: pass\n"
        "pickle.dumps(C())\n"
        "assert open(f'/proc/{os.getpid()}/comm').read().strip()\n"
        "for folder in ('.', tempfile.gettempdir(), os.environ['HOME']): open(folder + '/x', 'w').write('y')\n"
        "from other import value\n"
        "atexit.register(lambda: print('bye', value))\n"
        "threading.Thread(target=lambda: print('thread')).start()\n",
        **{"other.py": "value = 1"},
    )
    assert (result.status, result.stdout, result.stderr) == (0, "thread\nbye 1\n", "")


# Limits

NAMED = f"import ctypes, os, sys, time, signal\nctypes.CDLL(None).prctl(15, b'{NAME}', 0, 0, 0)\n"
LOOPS = {
    "C": "sum(range(10**15))",
    "signals": "for s in set(signal.valid_signals()) - {9, 19, 32, 33}:\n    signal.signal(s, lambda *a: None)\n"
    "while True: time.sleep(1)",
    "closed": "os.close(1); os.close(2); os.closerange(3, 100)\nwhile True: pass",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(99)",
    "grandchild": "if os.fork():\n    time.sleep(99)\nos.setsid()\nif os.fork():\n    time.sleep(99)\nos.setsid()\ntime.sleep(99)",
    "daemon": "if not os.fork():\n    os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep(99)\ntime.sleep(99)",
    "chains": "for _ in range(8):\n    if not os.fork():\n        while True:\n"
    "            if os.getpgrp() != os.getpid(): os.setsid()\n"
    "            if os.fork(): os._exit(0)\ntime.sleep(99)",
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_wall_limit(name: str, either: str) -> None:
    result = run(NAMED + LOOPS[name], wall=0.6)
    assert result.status is None and result.seconds < 0.6 + SLACK, result
    assert not _alive(NAME)


def test_a_watcher_that_hangs(either: str) -> None:
    """It is killed, and the script with it; before that the script is there to be found."""
    results: list[ScriptResult] = []
    thread = threading.Thread(target=lambda: results.append(run(NAMED + "while True: pass", wall=3)))
    thread.start()
    _until(lambda: bool(_alive(NAME)), 3)
    watchers = {
        int(p) for t in os.listdir("/proc/self/task") for p in Path(f"/proc/self/task/{t}/children").read_text().split()
    }
    for pid in watchers:
        if b"kbx_env.sandbox.script" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGSTOP)
    thread.join()
    assert results[0].status is None and results[0].seconds > 3
    _until(lambda: not _alive(NAME), SLACK)


def test_what_it_started_ends_with_it(either: str) -> None:
    # Nobody ends before the grandchild has printed: without namespaces it is killed as soon as it has no parent.
    result = run(
        f"{NAMED}heard, told = os.pipe()\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        print('here')\n"
        "        os.write(told, b'xx')\n        time.sleep(99)\n"
        "    os.read(heard, 1)\n    os._exit(0)\nif not os.fork(): time.sleep(99)\nos.read(heard, 1)"
    )
    assert result.status == 0 and result.seconds < SLACK and "here" in result.stdout


def test_the_end_of_a_flood() -> None:
    result = run(
        "import sys\nfor s in (sys.stdout, sys.stderr):\n    for _ in range(1000): s.write('x' * 100_000)\n    s.write('the end')",
        wall=20,
    )
    assert result.status == 0
    for text in (result.stdout, result.stderr):
        assert len(text) == CHARACTERS and text.endswith("xthe end")


def test_a_flood_without_an_end() -> None:
    result = run("import os\nwhile True: os.write(1, b'\\xff' * 65536)", wall=1)
    assert result.status is None and result.stdout == "\ufffd" * CHARACTERS
    assert run("print('\U0001f600' * 20_000)").stdout == "\U0001f600" * (CHARACTERS - 1) + "\n"


def test_too_many_processes(either: str) -> None:
    bomb = (
        "import os, time\nfor _ in range(600):\n    try:\n        if not os.fork(): time.sleep(60); os._exit(0)\n"
        "    except OSError: pass\ntime.sleep(60)"
    )
    result = run(bomb)
    assert result.status == -9 and f"more than {child.THREADS} processes" in result.stderr


def test_too_much_memory() -> None:
    result = run("import mmap\nmmap.mmap(-1, 7 << 30)")
    assert result.status == 1 and "Cannot allocate memory" in result.stderr


def test_a_flood_of_memory() -> None:
    """Each of its processes keeps to its limit; however far they come, they end in time."""
    result = run("import os\nos.fork()\nos.fork()\nb = []\nwhile True: b.append(bytearray(1 << 26))", wall=1.5)
    assert result.status in (None, 1, -9)


def test_too_many_files() -> None:
    result = run("n = 0\nwhile True: open(f'f{n}', 'w').close(); n += 1", wall=60)
    assert result.status == -9 and "files" in result.stderr


def test_a_deep_folder_is_removed() -> None:
    assert run("import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\n", wall=20).passed


def test_a_closed_folder_is_removed() -> None:
    assert run("import os\nos.makedirs('a/b/c')\nos.symlink('/', 'a/l')\nos.chmod('a/b', 0)\nos.chmod('a', 0)").passed


# Confinement


SECRETIVE = """
import os, sys
from kbx_env.grading.runtime import policy_script as scripts
assert b"ses" b"ame" in open("/proc/self/environ", "rb").read()
scripts._NAMESPACES = sys.argv[1] == "namespaces"
print(scripts.run_script({"a.py": f'''
import glob, os
# What it finds, not what it read: other processes' lines may be longer than what is kept of an output.
secret = b"emases"[::-1]
mine = os.fsencode(repr(dict(os.environ)))
print("language", b"TRITON_INTERPRET" in mine, "found", secret in mine)
for place in [*glob.glob("/proc/[0-9]*"), "/proc/{os.getpid()}", f"/proc/{{os.getppid()}}", "/proc/1"]:
    for name in ("environ", "cmdline"):
        try: print("read", name, "found", secret in open(f"{{place}}/{{name}}", "rb").read())
        except OSError: pass
'''}, "a.py"))
"""


@LANDLOCK
def test_no_secret(either: str) -> None:
    """Neither in its own environment nor in that of a process it can see."""
    secrets = dict.fromkeys(("MODEL_API_KEY", "HF_TOKEN", "MY_SECRET", "key_of_mine", "PYTHONSECRET"), "sesame")
    command = [sys.executable, "-c", SECRETIVE, either]
    done = subprocess.run(command, env={**os.environ, **secrets}, capture_output=True, text=True, timeout=60)
    assert "status=0" in done.stdout and "language True found False" in done.stdout, done.stderr
    assert "read environ" in done.stdout and "found True" not in done.stdout


def test_a_caller_that_dies(nothing_left: Path) -> None:
    """Killed in the middle: the script ends, and its folder goes."""
    code = (
        "from kbx_env.grading.runtime.policy_script import run_script\n"
        f"run_script({{'a.py': {NAMED + 'time.sleep(99)'!r}}}, 'a.py', wall=60)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(nothing_left)})
    _until(lambda: bool(_alive(NAME)), 20)
    caller.kill()
    caller.wait()
    _until(lambda: not _alive(NAME) and not list(nothing_left.iterdir()), 3)


@LANDLOCK
def test_out_of_reach(either: str, tmp_path: Path) -> None:
    """Other files, other processes, other machines: each attempt is refused."""
    file = tmp_path / "mine"
    file.write_text("mine")
    expert = str(next((Path(child.__file__).parents[2] / "baselines").rglob("*.py")))
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempts = {
            "write": f"open({str(file)!r}, 'w')",
            "read": f"open({str(file)!r})",
            "read experts": f"open({expert!r})",
            "read the watcher": f"open({child.__file__!r})",
            "read passwords": "open('/etc/shadow')",
            "make": f"open({str(tmp_path / 'new')!r}, 'w')",
            "remove": f"os.unlink({str(file)!r})",
            "move": f"os.rename('test.py', {str(tmp_path / 'moved')!r})",
            "link": f"os.link('test.py', {str(tmp_path / 'linked')!r})",
            "shared memory": "open('/dev/shm/kbx-was-here', 'w')",
            "environment": f"open('/proc/{os.getpid()}/environ', 'rb').read(1)",
            "memory": f"open('/proc/{os.getpid()}/mem', 'rb').read(1)",
            "parent's environment": "open(f'/proc/{os.getppid()}/environ', 'rb').read(1)",
            "connect": f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)",
            "mount": "check(ctypes.CDLL(None, use_errno=True).mount(None, b'/tmp', b'tmpfs', 0, None))",
        }
        # A datagram needs no connection, which is all that Landlock refuses.
        if (
            subprocess.run(["unshare", "-n" if either == "none" else "-Un", "true"], capture_output=True).returncode
            == 0
        ):
            datagram = "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))"
            attempts |= {"datagram": datagram}
        if landlock_version() >= 6:
            attempts |= {"signal": f"os.kill({os.getpid()}, 0)", "signal up": "os.kill(os.getppid(), 0)"}
        source = "import ctypes, os, socket\ndef check(r):\n    if r: raise OSError(ctypes.get_errno(), 'refused')\n"
        for name, line in attempts.items():
            source += f"try:\n    {line}\n    print({name!r})\nexcept OSError: pass\n"
        result = run(source)
    assert (result.status, result.stdout, result.stderr) == (0, "", "")
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]


def test_everything_that_a_process_is_told() -> None:
    """No descriptor of the grader's, no argument of the watcher's that it could talk with."""
    result = run(
        "import os\nprint(sorted(os.listdir('/proc/self/fd')))\ntry: os.write(3, b'x')\nexcept OSError: print('closed')"
    )
    assert result.stdout == "['0', '1', '2', '3']\nclosed\n"  # 3: the folder that is listed


# Callers


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\\b", "a\0b", "\ud800", "a" * 201])
def test_bad_names(name: str) -> None:
    with pytest.raises(UsageError, match="accepted"):
        run_script({name: "", "test.py": ""}, "test.py")


def test_bad_calls() -> None:
    assert run("print(1)", wall=1e-6).status is None
    with pytest.raises(UsageError, match=r"'b.py'.*accepted: a.py"):
        run_script({"a.py": ""}, "b.py")
    with pytest.raises(UsageError, match="accepted: none"):
        run_script({}, "b.py")
    with pytest.raises(UnknownName, match="accepted: cpu, cuda"):
        run_script({"a.py": ""}, "a.py", backend="tpu")
    for wall in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="accepted: a positive"):
            run_script({"a.py": ""}, "a.py", wall=wall)


def test_several_threads() -> None:
    results: dict[int, ScriptResult] = {}

    def one(k: int) -> None:
        results[k] = run(
            f"import time, mine\ntime.sleep(0.3)\nprint(mine.k)\nraise SystemExit({k})", **{"mine.py": f"k = {k}"}
        )

    threads = [threading.Thread(target=one, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {k: (r.status, r.stdout) for k, r in results.items()} == {k: (k, f"{k}\n") for k in range(4)}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text() | st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010)))
def test_any_text_arrives(text: str) -> None:
    result = run("import sys\nsys.stdout.buffer.write(open('text', 'rb').read())", text=text)
    assert result.status == 0
    assert result.stdout == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text() | st.sampled_from(["\ud800", "\0", "\ufeff1", "# coding: rot13", "# coding: no", "(" * 5000, "9" * 5000])
)
def test_any_script_has_a_result(source: str) -> None:
    assert run(source).status in (0, 1)

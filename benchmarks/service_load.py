"""Measures the grading service (``kbx serve``) on loopback: overhead, load, kills, a hostile client.

    python benchmarks/service_load.py overhead load queued hostile real --out runs/service.json

- ``overhead``: one client, a grader that costs nothing: the request through the service against the same executor called
  directly; and the request that the store answers. One of each in turn, so that all three see the same load. With
  ``--first`` (root only) their processes go before all others of the machine, so that no latency includes a wait for a core.
- ``load``: 500 clients in 10 processes submit 10,000 requests; the grader answers after ``--fake-ms``. In the middle, workers
  are killed, and then the service itself (``kill -9``), which is started again. Counts what was lost and graded twice.
- ``queued``: 500 clients submit all of their 10,000 requests at once, to workers with the real grader: ``--executed`` distinct
  expert kernels and 100 requests for each of 20 more, the rest sources that the screen refuses. Kills as in ``load``.
- ``hostile``: wrong tokens, a body of 1 GB, slow senders, 10,000 open sockets, malformed JSON, path tricks, while an honest
  client measures its latency.
- ``real``: real gradings of experts by the CPU backend through the service, against the same gradings without it.

All load stays on loopback, and is bounded in number and time. ``service_hosts.py`` cuts the link between two hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from kbx_env.client import AsyncClient, Client, ServiceError
from kbx_env.executor import Executor, ProcessPool, Request
from kbx_env.outcome import Outcome

TOKEN = "benchmark-" + "t" * 22
FAKE, LOGGED = "_service_worker:Grader", "_service_worker:Logged"
KERNELS = (
    "math/exp_sqrt", "math/sqrt_exp", "math/log", "math/add", "math/rad2deg_sqrt", "optimizer/SGD", "reduce/mean",
    "math/chebyshev_polynomial_t", "matrixmultiply/matmul", "quantization/layernorm_w8a8",
)  # fmt: skip
"""Tasks whose experts take 0.25 to 0.9 s of a core on the CPU backend."""
START = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from kbx_env.service.server import serve
from kbx_env.service.service import Settings
serve(Settings(port={port}, backend="cpu", workers={workers}, store={store!r}, token_file={token!r}, grader={grader!r}))
"""
GIB = 1 << 30
HEAD = f"POST /v1/gradings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {TOKEN}\r\n"


def rss(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def pss(pid: int) -> int:
    """Return the memory of a process in bytes; a page that n processes share counts as 1/n."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    return [int(p) for c in Path(f"/proc/{pid}/task").glob("*/children") for p in c.read_text().split()]


def family(pids: list[int]) -> list[int]:
    """Return processes with all that descend from them."""
    return pids + [p for pid in pids for p in family(children(pid))]


class Service:
    """The service as a process of its own, on a port that stays the same over restarts."""

    def __init__(self, folder: Path, grader: str, workers: int) -> None:
        self.folder, self.grader, self.workers = folder, grader, workers
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float = 120.0) -> float:
        """Start, and wait until it is ready; return the seconds that it took."""
        code = START.format(
            root=str(ROOT), here=str(ROOT / "benchmarks"), port=self.port, workers=self.workers, grader=self.grader,
            store=str(self.folder / "gradings.sqlite"), token=str(self.folder / "token"),
        )  # fmt: skip
        start = time.monotonic()
        self.process = subprocess.Popen([sys.executable, "-c", code])
        client = self.client(1.0)
        while True:
            with contextlib.suppress(ServiceError):
                client.health()
                return time.monotonic() - start
            if time.monotonic() - start > timeout or self.process.poll() is not None:
                raise SystemExit("the service did not start")
            time.sleep(0.05)

    def client(self, timeout_s: float = 900.0) -> Client:
        """Return a client."""
        return Client(self.url, TOKEN, timeout_s)

    def memory(self) -> int:
        """Return the resident memory of the service's own process in bytes, without its workers."""
        assert self.process
        return rss(self.process.pid)

    def workers_now(self) -> list[int]:
        """Return the process ids of the workers."""
        assert self.process
        return children(self.process.pid)

    def kill(self) -> None:
        """Do ``kill -9``."""
        assert self.process
        self.process.kill()
        self.process.wait()

    def end(self) -> float:
        """Send SIGTERM; return the seconds until the end."""
        assert self.process
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(180)
        return time.monotonic() - start


@contextlib.contextmanager
def service(grader: str, workers: int) -> Iterator[Service]:
    """Make a service in a temporary folder; kill it at the end."""
    with tempfile.TemporaryDirectory() as name:
        made = Service(Path(name), grader, workers)
        os.environ["KBX_FAKE_LOG"] = str(Path(name) / "graded")
        try:
            yield made
        finally:
            if made.process is not None:
                made.process.kill()
                made.process.wait()


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return p50, p99 and maximum in milliseconds."""
    ordered = sorted(seconds)
    at = lambda q: round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3)  # noqa: E731
    return {"n": len(ordered), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": round(1000 * ordered[-1], 3)}


def recorded_outcome() -> Outcome:
    """Grade one expert for real: the fake grader answers with an outcome of a usual size."""
    from kbx_env import grade
    from kbx_env.spec.catalog import expert_source

    return grade("math/softmax", expert_source("math/softmax"), backend="cpu", split="train")


def overhead(a: argparse.Namespace) -> dict[str, Any]:
    """Compare requests through the service with direct calls of the same executor, and with the same warm worker."""
    os.environ["KBX_FAKE_SECONDS"] = "0"
    source = "x = 1\n" * 500  # 3 kB, a usual kernel
    if a.first:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # all child processes inherit it
    seconds: dict[str, list[float]] = {"direct": [], "service": [], "from the store": []}
    with service(FAKE, 1) as made:
        made.start()
        pool = ProcessPool(1, FAKE)
        pool.ready(60)
        client = made.client()
        with Executor(pool) as executor:
            direct = lambda k: executor.submit(Request("math/softmax", f"{k}\n{source}".encode())).result()  # noqa: E731
            through = lambda k: client.grade("math/softmax", f"{k}\n{source}")  # noqa: E731
            for k in range(-50, a.requests):
                for name, call in (("direct", direct), ("service", through), ("from the store", through)):
                    start = time.perf_counter()
                    call(k)
                    if k >= 0:
                        seconds[name].append(time.perf_counter() - start)
    if a.first:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    found: dict[str, Any] = {name: quantiles(s) for name, s in seconds.items()}
    for name in ("p50_ms", "p99_ms"):
        found[f"overhead_{name}"] = round(found["service"][name] - found["direct"][name], 3)
    return found


def _clients(url: str, process: int, clients: int, each: int, out: str) -> None:
    """One process of the load: clients that grade one after the other, and write what they got."""

    async def one(client: AsyncClient, number: int, file: Any) -> None:
        for k in range(each):
            # Every fifth request is equal to one of another client.
            name = f"shared {k}" if k % 5 == 4 else f"{process} {number} {k}"
            start = time.perf_counter()
            outcome = await client.grade("math/softmax", f"{name}\n# a kernel")
            file.write(json.dumps([name, str(outcome.verdict), round(time.perf_counter() - start, 3)]) + "\n")

    async def all_of_them() -> None:
        with open(out, "w") as file:
            # A client of its own each: 500 clients share no connection.
            made = [AsyncClient(url, TOKEN, 900) for _ in range(clients)]
            await asyncio.gather(*(one(c, n, file) for n, c in enumerate(made)))

    asyncio.run(all_of_them())


def _queued_clients(url: str, process: int, clients: int, each: int, executed: int, out: str) -> None:
    """One process of the part ``queued``: clients that submit all at once, and write what they got."""
    from kbx_env.spec.catalog import expert_source

    experts = [(task, expert_source(task)) for task in KERNELS]

    def pair(name: str, kernel: int | None) -> tuple[str, str]:
        if kernel is None:
            return "math/softmax", f"# {name}\nx = 1\n"
        task, source = experts[kernel % len(experts)]
        return task, f"# {name}\n{source}"

    async def one(number: int, file: Any) -> None:
        names, pairs = [], []
        for k in range(each):
            client = process * clients + number
            if k == 4:  # an expert that 24 others ask for as well
                names.append(f"shared expert {client % 20}")
            elif k % 5 == 4:
                names.append(f"shared {k}")
            else:
                names.append(f"{process} {number} {k}")
            is_expert = k == 0 and client < executed
            pairs.append(pair(names[-1], client if is_expert else client % 20 if k == 4 else None))
        start = time.perf_counter()
        async with AsyncClient(url, TOKEN, 900) as made:
            async for n, outcome in made.grade_many(pairs, split="train", targets=[]):
                row = [names[n], str(outcome.verdict), round(time.perf_counter() - start, 3)]
                file.write(json.dumps(row) + "\n")

    async def all_of_them() -> None:
        with open(out, "w") as file:
            await asyncio.gather(*(one(n, file) for n in range(clients)))

    asyncio.run(all_of_them())


def load(a: argparse.Namespace) -> dict[str, Any]:
    """Run 500 clients with 10,000 requests one after the other, kill workers and the service, and count."""
    os.environ["KBX_FAKE_SECONDS"] = str(a.fake_ms / 1000)
    return _under_load(a, FAKE, _clients, ())


def queued(a: argparse.Namespace) -> dict[str, Any]:
    """Run 500 clients with 10,000 requests at once and real gradings, kill workers and the service, and count."""
    return _under_load(a, LOGGED, _queued_clients, (a.executed,))


def _under_load(a: argparse.Namespace, grader: str, work: Callable[..., None], more: tuple[Any, ...]) -> dict[str, Any]:
    import multiprocessing

    processes, each = 10, a.requests_of_load // a.clients
    per_process = a.clients // processes
    context = multiprocessing.get_context("spawn")
    with service(grader, 2) as made:
        made.start()
        log = made.folder / "graded"
        outs = [str(made.folder / f"client-{k}") for k in range(processes)]
        running = [
            context.Process(target=work, args=(made.url, k, per_process, each, *more, out)) for k, out in enumerate(outs)
        ]
        before, start, events, memory = made.memory(), time.monotonic(), list[str](), list[list[float]]()
        asked, most = list[float](), 0
        for p in running:
            p.start()
        killed, total, probe = 0, 0.8 * a.requests_of_load, made.client(30)
        while any(p.is_alive() for p in running) and time.monotonic() - start < a.limit:
            time.sleep(0.5)
            graded = len(log.read_bytes().splitlines()) if log.exists() else 0
            with contextlib.suppress(OSError, ServiceError):
                workers = sum(map(pss, family(made.workers_now())))
                memory.append([round(time.monotonic() - start, 1), graded, made.memory() >> 20, workers >> 20])
                asking = time.perf_counter()
                most = max(most, probe.health()["waiting"])
                asked.append(time.perf_counter() - asking)
            if killed < 3 and graded > total * (killed + 1) / 8:  # workers
                os.kill(made.workers_now()[0], signal.SIGKILL)
                events.append(f"{time.monotonic() - start:.1f} s: a worker killed after {graded} gradings")
                killed += 1
            if killed == 3 and graded > total / 2:
                made.kill()
                took = made.start()
                at = f"{time.monotonic() - start:.1f} s"
                events.append(f"{at}: the service killed after {graded} gradings, ready again in {took:.1f} s")
                killed += 1
        for p in running:
            p.join(5)
            p.kill()
        seconds = time.monotonic() - start
        rows = [json.loads(line) for out in outs if Path(out).exists() for line in Path(out).read_text().splitlines()]
        counted = Counter(line.split(b" ", 1)[1] for line in log.read_bytes().splitlines())
        ended = made.end()
    names = {name for name, _, _ in rows}
    verdicts: dict[str, set[str]] = {}
    for name, verdict, _ in rows:
        verdicts.setdefault(name, set()).add(verdict)
    return {
        "clients": a.clients, "requests": per_process * processes * each, "answered": len(rows),
        "verdicts": dict(Counter(v for _, v, _ in rows)), "distinct_answered": len(names),
        "two_verdicts_for_one_source": sum(len(v) > 1 for v in verdicts.values()), "most_waiting": most,
        "graded": sum(counted.values()), "graded_twice": sum(n > 1 for n in counted.values()), "seconds": round(seconds, 1),
        "requests_per_second": round(len(rows) / seconds, 1), "latency": quantiles([s for _, _, s in rows]) if rows else None,
        "readyz": quantiles(asked) if asked else None, "events": events, "memory_MB_at_start": before >> 20,
        "memory_MB: seconds, gradings, service, workers": memory[:: max(1, len(memory) // 16)], "sigterm_seconds": round(ended, 2),
    }  # fmt: skip


def _raw(port: int, data: bytes, more: Callable[[socket.socket], None] | None = None, seconds: float = 45.0) -> str:
    """Send bytes; return the status line of the answer, or what happened instead."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as s:
        with contextlib.suppress(OSError):
            s.sendall(data)
            if more is not None:
                more(s)
        try:
            line = s.recv(65536).split(b"\r\n", 1)[0].decode("latin-1")
        except OSError as e:
            return type(e).__name__
        return line or "closed"


def hostile(a: argparse.Namespace) -> dict[str, Any]:
    """Attack a service while an honest client measures its latency."""
    os.environ["KBX_FAKE_SECONDS"] = "0"
    found: dict[str, Any] = {}
    with service(FAKE, 1) as made:
        made.start()
        stop, honest = threading.Event(), dict[str, list[float]]()
        phase = ["quiet"]
        failures: list[str] = []

        def be_honest() -> None:
            client, k = made.client(30), 0
            while not stop.is_set():
                start = time.perf_counter()
                outcome = client.grade("math/softmax", f"honest {k}")
                honest.setdefault(phase[0], []).append(time.perf_counter() - start)
                if not outcome.correct:
                    failures.append(outcome.message)
                k += 1
                time.sleep(0.005)

        thread = threading.Thread(target=be_honest)
        thread.start()
        time.sleep(2)
        head, length = HEAD, "Content-Length: {}\r\n\r\n"
        wrong = head.replace(TOKEN, "wrong")
        phase[0] = "wrong tokens"
        guess = (wrong + length.format(2) + "{}").encode()
        found["2,000 wrong tokens"] = dict(Counter(_raw(made.port, guess) for _ in range(2000)))
        phase[0] = "1 GB"
        for name, begin, rest, more in (
            ("10 x 1 GB declared, wrong token", wrong, length.format(GIB), _flood),
            ("10 x 1 GB declared", head, length.format(GIB), _flood),
            ("10 x 1 GB in chunks", head, "Transfer-Encoding: chunked\r\n\r\n", _flood_chunks),
        ):
            found[name] = dict(Counter(_raw(made.port, (begin + rest).encode(), more) for _ in range(10)))
        before = made.memory()
        phase[0] = "slow senders"
        slow: list[str] = []
        threads = [
            threading.Thread(target=lambda: slow.append(_raw(made.port, (head + length.format(1000)).encode(), _drip)))
            for _ in range(100)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        found["100 slow senders"] = dict(Counter(slow))
        phase[0] = "10,000 sockets"
        found["sockets"] = _many_sockets(made, a.sockets)
        phase[0] = "malformed, path tricks"
        bodies = [
            b"{", b"[" * 100_000, b'{"task": NaN}', b"\xff\xfe", b'"' + b"\\ud800" * 1000,
            b'{"task":"math/abs","source":"x","id":1}',
        ]  # fmt: skip
        found["malformed JSON"] = dict(Counter(
            _raw(made.port, (head + length.format(len(b))).encode() + b) for b in bodies * 100
        ))  # fmt: skip
        paths = [
            "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/", "math/softmax%00", "math//softmax", "/etc/passwd", "a" * 9000
        ]  # fmt: skip
        rest = f" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        found["path tricks"] = dict(Counter(_raw(made.port, f"GET /v1/tasks/{p}{rest}".encode()) for p in paths * 50))
        found["not HTTP"] = _raw(made.port, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        stop.set()
        thread.join()
        found |= {"honest failures": failures, "memory_MB": [before >> 20, made.memory() >> 20]}
        found["honest client"] = {name: quantiles(s) for name, s in honest.items()}
    return found


def _flood(s: socket.socket) -> None:
    block = b"x" * (1 << 20)
    for _ in range(1024):
        s.sendall(block)


def _flood_chunks(s: socket.socket) -> None:
    block = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    for _ in range(1024):
        s.sendall(block)


def _drip(s: socket.socket) -> None:
    for _ in range(60):
        s.sendall(b" ")
        time.sleep(1)


def _many_sockets(made: Service, count: int) -> dict[str, Any]:
    """Open sockets from processes of their own and hold them for 20 s."""
    code = (
        "import socket, sys, time, resource\n"
        "port, n = map(int, sys.argv[1:])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\n"
        "held, failed = [], 0\n"
        "for _ in range(n):\n"
        "    s = socket.socket(); s.settimeout(5)\n"
        "    try: s.connect(('127.0.0.1', port)); held.append(s)\n"
        "    except OSError: failed += 1\n"
        "time.sleep(20)\n"
        "print(len(held), failed)\n"
    )
    each = count // 4
    start = time.monotonic()
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(made.port), str(each)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = [p.communicate(timeout=180)[0].split() for p in running]
    text = made.client().info()
    return {
        "opened": sum(int(x[0]) for x in answers), "refused": sum(int(x[1]) for x in answers),
        "seconds": round(time.monotonic() - start, 1), "limit": text["limits"]["connections"],
    }  # fmt: skip


def real(a: argparse.Namespace) -> dict[str, Any]:
    """Grade experts for real, through the service and with worker processes of the same number."""
    from kbx_env import grade_many
    from kbx_env.executor.pools.process import GRADER
    from kbx_env.spec.catalog import expert_source, task_ids

    tasks = task_ids()[:: max(1, len(task_ids()) // a.real)][: a.real]
    pairs = [(t, expert_source(t)) for t in tasks]
    with service(GRADER, 2) as made:
        made.start()
        client = made.client()
        list(client.grade_many([("math/abs", "x = 1"), ("math/cos", "x = 1")]))  # the workers are warm
        start = time.monotonic()
        through = dict(client.grade_many(pairs, split="train", targets=["sm_90"]))
        with_service = time.monotonic() - start
        start = time.monotonic()
        again = dict(client.grade_many(pairs, split="train", targets=["sm_90"]))
        from_store = time.monotonic() - start
        made.end()
    start = time.monotonic()
    direct = grade_many(pairs, workers=2, progress=False, backend="cpu", split="train", targets=("sm_90",))
    without = time.monotonic() - start
    return {
        "gradings": len(pairs), "correct": sum(o.correct for o in through.values()),
        "same_verdicts": all(through[k].verdict == o.verdict for k, o in enumerate(direct)), "same_again": again == through,
        "seconds_service": round(with_service, 1), "seconds_grade_many_with_start": round(without, 1),
        "seconds_from_the_store": round(from_store, 2),
        "mean_grading_seconds": round(statistics.mean(o.seconds["total"] for o in through.values()), 2),
    }  # fmt: skip


PARTS = {"overhead": overhead, "load": load, "queued": queued, "hostile": hostile, "real": real}


def main() -> None:
    """Measure the parts that are named, and write them into the file."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="+", choices=PARTS)
    p.add_argument("--out", type=Path, default=Path("runs/service.json"))
    p.add_argument("--requests", type=int, default=500, help="of the part overhead")
    p.add_argument("--clients", type=int, default=500)
    p.add_argument("--requests-of-load", type=int, default=10_000)
    p.add_argument("--fake-ms", type=float, default=5.0)
    p.add_argument("--limit", type=float, default=600.0, help="seconds of the part load")
    p.add_argument("--sockets", type=int, default=10_000)
    p.add_argument("--executed", type=int, default=400, help="distinct experts of the part queued, beside 20 shared ones")
    p.add_argument("--first", action="store_true", help="part overhead: before all other processes of the machine")
    p.add_argument("--real", type=int, default=40, help="real gradings")
    a = p.parse_args()
    a.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcome = recorded_outcome() if set(a.parts) - {"real", "queued"} else None
    if outcome is not None:
        os.environ["KBX_FAKE_OUTCOME"] = outcome.to_json()
    for part in a.parts:
        found = PARTS[part](a)
        everything = json.loads(a.out.read_text()) if a.out.is_file() else {}
        a.out.write_text(json.dumps({**everything, part: found}, indent=1) + "\n")
        print(part, json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()

"""The policy ``kernelagent`` (Meta's KernelAgent): a model writes a test, and repairs kernels until one passes.

The grader grades one source, at the end, and the model never sees a verdict. docs/methods.md lists the differences from
the published code.
"""

from __future__ import annotations

import io
import re
import tokenize
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from kbx_env.baselines import _kernelagent_prompts as prompts
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.caller import CallSession
from kbx_env.baselines.llm.chat import ChatRequest, Reply
from kbx_env.baselines.llm.extract import kernel_in
from kbx_env.baselines.llm.method import Method, Sampling
from kbx_env.baselines.policy import Needs

from kbx_env.envs.answer import defines
from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.errors import NoAnswer
from kbx_env.grading.runtime.policy_script import ScriptResult
from kbx_env.spec.task import Task

NAME = "kernelagent"
SAMPLING = Sampling(max_tokens=20000, temperature=0.4)
"""The temperature is the paper's; the published code has 0.8 and 0.7."""
TEST_TOKENS = 24000
"""Most tokens of the answer with the test, unless ``--max-tokens`` sets another limit."""
WORKERS, ROUNDS = 3, 5
"""Kernels that are repaired side by side, and the most rounds of test and repair."""
WALL = 30.0
"""Seconds for one run of the test."""
HISTORY, CODE, STDERR, STDOUT = 8, 500, 2000, 1000
"""Most earlier rounds in the prompt of a repair, and the most characters of each part of a round."""
FUNCTION = "kernel_function"
"""Name of the function in the kernel's file."""

BANS = {
    "torch.nn": r"\btorch\s*\.\s*nn\b|\bfrom\s+torch\s+import\s+nn\b|\bnn\s*\.\s*\w+",
    "torch.nn.functional": r"(?<![\w.])F\s*\.\s*\w+\s*\(",
    "torch convolutions, activations, pooling": (
        r"\btorch\s*\.\s*(?:conv\w*|relu|gelu|silu|sigmoid|tanh|softmax|log_softmax|softplus|selu|celu|\w*_pool\d?d?|batch_norm|layer_norm)\s*\("
    ),
    "torch matrix products": (
        r"\btorch\s*\.\s*(?:matmul|mm|bmm|einsum|addmm|baddbmm|mv|dot|tensordot)\b|\.\s*(?:matmul|mm|bmm|einsum)\s*\("
    ),
    "torch.ops": r"\btorch\s*\.\s*ops\b",
    "forward of a module": r"\.\s*forward\s*\(",
    "inspect, globals, locals": r"\binspect\b|\b(?:globals|locals)\s*\(",
}
"""Forbidden contents of a kernel file: regular expressions, applied to its code without comments and strings."""


def banned(code: str) -> list[str]:
    """Return the names of the bans that a kernel file breaks."""
    text = _without_literals(code)
    return [name for name, pattern in BANS.items() if re.search(pattern, text)]


def _without_literals(code: str) -> str:
    """Replace comments and strings by blanks; code that is not Python is returned unchanged."""
    lines = [list(line) for line in code.splitlines(keepends=True)]
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                (top, left), (bottom, right) = token.start, token.end
                for row in range(top - 1, bottom):
                    begin, end = (left if row == top - 1 else 0), (right if row == bottom - 1 else len(lines[row]))
                    lines[row][begin:end] = [" " if c != "\n" else c for c in lines[row][begin:end]]
    except (tokenize.TokenError, SyntaxError, IndexError):
        return code
    return "".join("".join(line) for line in lines)


@dataclass
class Worker:
    """One of the kernels that are repaired side by side.

    Attributes:
        code: its present source; ``None`` while no answer contained one.
        history: source, standard error and standard output of earlier rounds, shortened.
    """

    code: str | None
    history: list[tuple[str, str, str]] = field(default_factory=list)


class KernelAgent(Method):
    """Writes a test and kernels, and hands in the first kernel that passes the test."""

    needs = Needs(own_tests=True)

    def run(self, task: Task, env: Episode) -> Trajectory:
        """Solve a task: one test, three kernels, five rounds; at most 19 calls, 15 runs of the test and one grading.

        Args:
            task: the task.
            env: runs the test.

        Returns:
            The first kernel that passes the model's own test, or the reason why there is none.
        """
        session = self.caller.session(self.name, task.id, env.sample)
        signature = str(task.signature)
        test = self._test(session, task, env)
        if test is None:
            return Trajectory(None, "the model wrote no test that imports kernel_function")
        requests = [(f"seed {w}", self._request(prompts.seed(test, signature))) for w in range(WORKERS)]
        workers = [Worker(_code(reply)) for reply in session.ask_all(requests)]
        if not any(w.code for w in workers):
            return Trajectory(None, "none of the first answers held a kernel")
        for number in range(ROUNDS):
            # All workers finish a round before the next one begins, so that the result does not depend on their speed.
            with ThreadPoolExecutor(WORKERS) as pool:
                runs = [pool.submit(self._try, session, env, test, w, number, i) for i, w in enumerate(workers)]
                results = [r.result() for r in runs]
            for index, (worker, result) in enumerate(zip(workers, results, strict=True)):
                if result.passed and worker.code is not None:
                    outcome = f"worker {index} passed its own test in round {number}"
                    return Trajectory(as_entry(worker.code, task.entry), notes={"own_test": outcome, "test": test})
            self._repair(session, test, signature, workers, results, number)
        return Trajectory(None, f"no kernel passed the model's own test in {ROUNDS} rounds", notes={"test": test})

    def _request(self, text: str) -> ChatRequest:
        return self.sampling.request(({"role": "user", "content": text},))

    def _test(self, session: CallSession, task: Task, env: Episode) -> str | None:
        request = self._request(prompts.write_test(env.prompt, str(task.signature), env.backend))
        most = request.max_tokens
        if self.sampling.max_tokens == SAMPLING.max_tokens:
            most = max(TEST_TOKENS, most)
        code = _code(session.ask("test", replace(request, max_tokens=most)), function=None)
        return code if code is not None and FUNCTION in code else None

    @staticmethod
    def _try(session: CallSession, env: Episode, test: str, worker: Worker, number: int, index: int) -> ScriptResult:
        if worker.code is None:
            return ScriptResult(1, "", f"the answer held no Python code that defines {FUNCTION}", 0.0)
        if broken := banned(worker.code):
            return ScriptResult(1, "", f"kernel.py uses what is forbidden: {'; '.join(broken)}", 0.0)
        files = {"kernel.py": worker.code, "test_kernel.py": test}
        label = f"round {number}, worker {index}, test"
        return session.script(label, files, lambda: env.run_script(files, "test_kernel.py", WALL))

    def _repair(
        self, session: CallSession, test: str, signature: str, workers: list[Worker], results: list[ScriptResult],
        number: int,
    ) -> None:  # fmt: skip
        requests = []
        for index, (worker, result) in enumerate(zip(workers, results, strict=True)):
            code = worker.code or ""
            stderr = result.stderr if result.status is not None else f"{result.stderr}\nended after {WALL:g} s"
            text = prompts.refine(test, signature, code, stderr, result.stdout, worker.history[-HISTORY:])
            worker.history.append((code[:CODE], stderr[-STDERR:], result.stdout[-STDOUT:]))
            requests.append((f"round {number}, worker {index}, refine", self._request(text)))
        for worker, reply in zip(workers, session.ask_all(requests), strict=True):
            # After an answer without a kernel the worker keeps its kernel.
            worker.code = _code(reply) or worker.code


def _code(reply: Reply, function: str | None = FUNCTION) -> str | None:
    """Return the code of an answer; ``None`` if there is none or it lacks a function that it must define."""
    try:
        code = kernel_in(reply, function or FUNCTION)
    except NoAnswer:
        return None
    return code if function is None or defines(code, function) else None


def as_entry(code: str, entry: str) -> str:
    """Return a kernel file that also defines the name of the task's entry function.

    Args:
        code: the file.
        entry: name of the entry function.

    Returns:
        The file, with an alias where it does not define that name.
    """
    return code if defines(code, entry) else f"{code.rstrip()}\n\n\n{entry} = {FUNCTION}\n"


def build(argument: str | None, access: Access) -> KernelAgent:
    """Make the policy.

    Args:
        argument: the model's name, in place of ``access.model``.
        access: how to reach the model.

    Returns:
        The policy.
    """
    return KernelAgent(NAME, access, argument, SAMPLING)

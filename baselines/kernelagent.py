"""KernelAgent (Meta), episodic: a model writes a test, then kernels, and repairs them until one passes its own test.

The grader is asked once, at the end: its verdicts are never shown to the model. What follows the published code and what
does not is in docs/methods.md.
"""

from __future__ import annotations

import io
import re
import tokenize
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from kbx_env.baselines import _kernelagent_prompts as prompts
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.caller import Talk
from kbx_env.baselines.llm.chat import Ask, Reply
from kbx_env.baselines.llm.extract import defines, kernel_in
from kbx_env.baselines.llm.method import Method, Sampling
from kbx_env.baselines.policy import Needs

from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.errors import NoAnswer
from kbx_env.grading.runtime.policy_script import ScriptResult
from kbx_env.spec.task import Task

NAME = "kernelagent"
SAMPLING = Sampling(max_tokens=20000, temperature=0.4)
"""The temperature is the paper's; the published default is 0.8 and 0.7."""
TEST_TOKENS = 24000
WORKERS, ROUNDS = 3, 5
WALL = 30.0
"""Seconds for one run of the test."""
HISTORY, CODE, STDERR, STDOUT = 8, 500, 2000, 1000
"""Rounds that a repair is shown, and characters of each part."""
FUNCTION = "kernel_function"

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
"""What a kernel file may not hold, as regular expressions over its code without comments and strings."""


def banned(code: str) -> list[str]:
    """Which bans a file breaks."""
    text = _bare(code)
    return [name for name, pattern in BANS.items() if re.search(pattern, text)]


def _bare(code: str) -> str:
    """Code without comments and strings; as it is where it cannot be read as Python."""
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
    """One of the kernels that are repaired side by side."""

    code: str | None
    last: ScriptResult | None = None
    history: list[tuple[str, str, str]] = field(default_factory=list)


class KernelAgent(Method):
    """See the module."""

    needs = Needs(own_tests=True)

    def run(self, task: Task, env: Episode) -> Trajectory:
        """One test, three kernels, five rounds; at most 19 calls, 15 runs of the test and one grading."""
        talk = self.caller.talk(self.name, task.id, env.sample)
        signature = str(task.signature)
        test = self._test(talk, task, env)
        if test is None:
            return Trajectory(None, "the model wrote no test that imports kernel_function")
        asks = [(f"seed {w}", self._ask(prompts.seed(test, signature))) for w in range(WORKERS)]
        workers = [Worker(_code(reply)) for reply in talk.ask_all(asks)]
        if not any(w.code for w in workers):
            return Trajectory(None, "none of the first answers held a kernel")
        for number in range(ROUNDS):
            # All workers finish a round before the next begins: which one wins does not depend on whose server was faster.
            with ThreadPoolExecutor(WORKERS) as pool:
                runs = [pool.submit(self._try, talk, env, test, w, number, i) for i, w in enumerate(workers)]
                results = [r.result() for r in runs]
            for index, (worker, result) in enumerate(zip(workers, results, strict=True)):
                if result.passed and worker.code is not None:
                    outcome = f"worker {index} passed its own test in round {number}"
                    return Trajectory(as_entry(worker.code, task.entry), notes={"own_test": outcome, "test": test})
            self._repair(talk, test, signature, workers, results, number)
        return Trajectory(None, f"no kernel passed the model's own test in {ROUNDS} rounds", notes={"test": test})

    def _ask(self, text: str) -> Ask:
        return self.sampling.ask(({"role": "user", "content": text},))

    def _test(self, talk: Talk, task: Task, env: Episode) -> str | None:
        ask = self._ask(prompts.write_test(env.prompt, str(task.signature), env.backend))
        most = max(TEST_TOKENS, ask.max_tokens) if self.sampling.max_tokens == SAMPLING.max_tokens else ask.max_tokens
        code = _code(talk.ask("test", replace(ask, max_tokens=most)), wanted=None)
        return code if code is not None and FUNCTION in code else None

    @staticmethod
    def _try(talk: Talk, env: Episode, test: str, worker: Worker, number: int, index: int) -> ScriptResult:
        if worker.code is None:
            return ScriptResult(1, "", f"the answer held no Python code that defines {FUNCTION}", 0.0)
        if broken := banned(worker.code):
            return ScriptResult(1, "", f"kernel.py uses what is forbidden: {'; '.join(broken)}", 0.0)
        files = {"kernel.py": worker.code, "test_kernel.py": test}
        label = f"round {number}, worker {index}, test"
        return talk.script(label, files, lambda: env.run_script(files, "test_kernel.py", WALL))

    def _repair(
        self, talk: Talk, test: str, signature: str, workers: list[Worker], results: list[ScriptResult], number: int
    ) -> None:
        asks = []
        for index, (worker, result) in enumerate(zip(workers, results, strict=True)):
            code = worker.code or ""
            stderr = result.stderr if result.status is not None else f"{result.stderr}\nended after {WALL:g} s"
            text = prompts.refine(test, signature, code, stderr, result.stdout, worker.history[-HISTORY:])
            worker.history.append((code[:CODE], stderr[-STDERR:], result.stdout[-STDOUT:]))
            asks.append((f"round {number}, worker {index}, refine", self._ask(text)))
        for worker, reply in zip(workers, talk.ask_all(asks), strict=True):
            # An answer without a kernel costs the round, the kernel stays.
            worker.code = _code(reply) or worker.code


def _code(reply: Reply, wanted: str | None = FUNCTION) -> str | None:
    try:
        code = kernel_in(reply, wanted or FUNCTION)
    except NoAnswer:
        return None
    return code if wanted is None or defines(code, wanted) else None


def as_entry(code: str, entry: str) -> str:
    """The file with its function under the name that the task asks for as well."""
    return code if defines(code, entry) else f"{code.rstrip()}\n\n\n{entry} = {FUNCTION}\n"


def build(argument: str | None, access: Access) -> KernelAgent:
    """``argument`` is the model's name."""
    return KernelAgent(NAME, access, argument, SAMPLING)

"""Runs a checkpoint on this machine: with vLLM where it is installed and there is a GPU, else with transformers.

Requests of several threads form a batch. Every row of a batch is sampled with a generator of its own, so that an answer
depends on its request and seed, and not on the other requests of the batch.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kbx_env.baselines.llm.chat import CallFailed, ChatRequest, Finish, Reply
from kbx_env.baselines.llm.conversation import Conversation, Prompting

from kbx_env.errors import KbxError, UsageError
from kbx_env.extras import install_hint

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.*")
"""Patterns of the files of a tokenizer, one of which must exist."""
_LOADING = threading.Lock()
"""Held while a checkpoint is loaded: loading sets torch's default device for the whole process."""
_BATCH_WINDOW = 0.05
"""Seconds for which a batch waits for further requests."""
_Job = tuple[ChatRequest, "Future[Reply]"]


class LocalModel:
    """Answers requests like a server. The checkpoint is checked at once and loaded with the first request."""

    def __init__(self, folder: str, device: str | None = None, batch: int = 8) -> None:
        """Check a checkpoint.

        Args:
            folder: with config.json, weights and tokenizer.
            device: of torch; ``None`` for a GPU if there is one, else the CPU.
            batch: most requests in a batch.

        Raises:
            UsageError: the folder is no checkpoint or has no tokenizer, there is no such device, or transformers is not
                installed.
        """
        self.model, self._folder, self._batch = folder, Path(folder), batch
        self._tokenizer = tokenizer_of(self._folder)
        has_template = self._tokenizer.chat_template is not None
        self.prompting = Prompting.of(self._folder)
        self._conversation = Conversation(self._tokenizer, prompting=self.prompting) if has_template else None
        self._device = _device(device)
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def complete(self, request: ChatRequest) -> Reply:
        """Ask once; waits until the request's batch has been answered.

        Args:
            request: the request.

        Returns:
            The complete answer.

        Raises:
            CallFailed: the prompt is too long, or the model failed.
            UsageError: the checkpoint cannot be loaded, or its tokenizer has no chat template.
        """
        future: Future[Reply] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="model", daemon=True)
                self._thread.start()
        self._jobs.put((request, future))
        return future.result()

    def close(self) -> None:
        """End the thread of the model. Its memory is freed when the process ends."""
        self._jobs.put(None)

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, of transformers."""
        return self._tokenizer

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """Return the ids of the prompt's tokens, rendered with the checkpoint's own chat template.

        Args:
            request: the request; its ``ids`` are taken where it has any, and its ``raw`` where there is no template.

        Returns:
            The ids.

        Raises:
            UsageError: the tokenizer has no chat template, and the request no prompt as text.
        """
        if request.ids is not None:
            return list(request.ids)
        if self._tokenizer.chat_template is None:
            if request.raw is None:
                remedy = "save one with it (chat_template.jinja)"
                raise UsageError(f"{self._folder}: the tokenizer has no chat template; {remedy}")
            return list(self._tokenizer(request.raw)["input_ids"])
        messages = [dict(m) for m in request.messages]
        more = self.prompting.template_kwargs
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **more)
        # The template has written the special tokens already.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _work(self) -> None:
        engine: Any = None
        while (first := self._jobs.get()) is not None:
            jobs = self._gathered(first)
            try:
                if engine is None:
                    with _LOADING:
                        engine = _engine(self._folder, self._tokenizer, self._device)
                self._answer(engine, jobs)
            except BaseException as e:
                text = f"{type(e).__name__}: {e}"
                error = e if isinstance(e, KbxError) else CallFailed("local", text, retryable=False)
                for _, future in jobs:
                    if not future.done():
                        future.set_exception(error)

    def _gathered(self, first: _Job) -> list[_Job]:
        """Return a batch: a job, and those that arrive within the batch window."""
        jobs, end = [first], time.monotonic() + _BATCH_WINDOW
        while len(jobs) < self._batch and (left := end - time.monotonic()) > 0:
            try:
                job = self._jobs.get(timeout=left)
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)
                break
            jobs.append(job)
        return jobs

    def _answer(self, engine: Any, jobs: list[_Job]) -> None:
        accepted = []
        for request, future in jobs:
            ids = self.prompt_ids(request)
            if engine.context is not None and len(ids) >= engine.context:
                text = f"a prompt of {len(ids)} tokens; the model takes {engine.context} with the answer"
                future.set_exception(CallFailed("too_long", text, retryable=False))
            else:
                begun = "" if self._conversation is None else self._conversation.begun(request.messages)
                accepted.append((request, future, ids, begun))
        start = time.monotonic()
        answers = engine([r for r, *_ in accepted], [ids for _, _, ids, _ in accepted]) if accepted else []
        for (request, future, ids, begun), (tokens, ended) in zip(accepted, answers, strict=True):
            text, stopped = _cut(self._tokenizer.decode(tokens, skip_special_tokens=True), request.stop)
            text = begun + text
            finish = Finish.STOP if ended or stopped else Finish.LENGTH
            seconds = time.monotonic() - start
            future.set_result(Reply(text, finish, "", len(ids), len(tokens), None, self.model, seconds, tuple(tokens)))


def tokenizer_of(folder: Path, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a checkpoint folder, after a check that config, weights and tokenizer exist.

    Args:
        folder: the checkpoint.
        trust_remote_code: run Python code of the folder that transformers does not have.

    Returns:
        The tokenizer of transformers; it pads on the left.

    Raises:
        UsageError: there is no such folder, a file is missing or cannot be loaded, or transformers is not installed.
    """
    if not folder.is_dir():
        remedy = "models are not fetched from a hub: give a folder on this machine"
        raise UsageError(f"no checkpoint folder {str(folder)!r}; {remedy}")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is no checkpoint: it has no config.json (save it with save_pretrained)")
    weights = ("*.safetensors", "pytorch_model*.bin")
    if not any(any(folder.glob(w)) for w in weights):
        raise UsageError(f"{folder} is no checkpoint: it has no weights ({' or '.join(weights)})")
    # Without these files transformers makes an empty tokenizer of the model's type, without a warning.
    if not any(any(folder.glob(t)) for t in _TOKENIZERS):
        raise UsageError(f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}); save it beside the model")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise UsageError(f"local checkpoints need transformers: {install_hint('trl')}") from e
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, padding_side="left", trust_remote_code=trust_remote_code
        )
    except Exception as e:
        why = f"{type(e).__name__}: {str(e)[:300]}"
        raise UsageError(f"{folder}: no usable tokenizer: {why}; save it beside the model") from e


def _device(name: str | None) -> str:
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as e:
        raise UsageError(f"--device {chosen!r}: {str(e).splitlines()[0]}; use --device cpu") from e
    return chosen


def _cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Return a text up to the first stop text, and whether there is one."""
    found = [i for s in stop if (i := text.find(s)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def _engine(folder: Path, tokenizer: Any, device: str) -> Any:
    """Load a model.

    Args:
        folder: the checkpoint.
        tokenizer: its tokenizer.
        device: torch device.

    Returns:
        A function of requests and the ids of their prompts. It returns for each the ids of the new tokens, and whether
        the model ended the answer by itself. Its attribute ``context`` is the most tokens of prompt and answer, or
        ``None``.
    """
    try:
        if device.startswith("cuda") and importlib.util.find_spec("vllm") is not None:
            return _VLLM(folder)
        return _Transformers(folder, tokenizer, device)
    except Exception as e:
        raise UsageError(f"{folder}: the checkpoint cannot be loaded: {type(e).__name__}: {str(e)[:300]}") from e


class _VLLM:
    def __init__(self, folder: Path) -> None:
        from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

        self._llm = LLM(str(folder))
        self.context: int | None = int(self._llm.llm_engine.model_config.max_model_len)

    def __call__(self, requests: list[ChatRequest], prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=r.max_tokens, temperature=1.0 if r.temperature is None else r.temperature,
                top_p=r.top_p or 1.0, seed=r.seed, stop=list(r.stop) or None,
            ) for r in requests
        ]  # fmt: skip
        answers = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [(list(a.outputs[0].token_ids), a.outputs[0].finish_reason == "stop") for a in answers]


class _Transformers:
    def __init__(self, folder: Path, tokenizer: Any, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._torch, self._device = torch, device
        dtype = "auto" if device != "cpu" else torch.float32  # CPUs are slow in half precision, or lack operations
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model = model.to(device).eval()
        configured = self._model.generation_config.eos_token_id
        ends = configured if isinstance(configured, list) else [configured]
        self._ends = {e for e in (*ends, tokenizer.eos_token_id) if e is not None}
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self._ends, default=0)
        self._config = GenerationConfig
        self.context: int | None = getattr(self._model.config, "max_position_embeddings", None)

    def __call__(self, requests: list[ChatRequest], prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
        torch, width = self._torch, max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        longest = max(r.max_tokens for r in requests)
        longest = min(longest, self.context - width) if self.context is not None else longest
        ends = sorted(self._ends) or None
        config = self._config(max_new_tokens=longest, do_sample=False, eos_token_id=ends, pad_token_id=self._pad)
        with torch.inference_mode():
            sampler = _GumbelSampler(requests, self._device)
            out = self._model.generate(
                ids, attention_mask=mask, generation_config=config, logits_processor=[sampler]
            )  # fmt: skip
        answers = []
        for request, row in zip(requests, out[:, width:].tolist(), strict=True):
            end = next((i for i, t in enumerate(row) if t in self._ends), None)
            tokens = row if end is None else row[:end]
            answers.append((tokens[: request.max_tokens], end is not None and end <= request.max_tokens))
        return answers


class _GumbelSampler:
    """Samples with the Gumbel-max trick: adds noise from the row's own generator to the logits.

    With Gumbel noise g and logits l, argmax(l + g) has the distribution softmax(l), so greedy decoding then samples.
    """

    def __init__(self, requests: list[ChatRequest], device: str) -> None:
        import torch

        self._torch, self._requests = torch, requests
        self._generators = [torch.Generator("cpu").manual_seed(r.seed or 0) for r in requests]
        self._device = device

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        torch, rows = self._torch, []
        for request, generator, row in zip(self._requests, self._generators, scores.float()):
            # 1 is also the default of servers.
            temperature = 1.0 if request.temperature is None else request.temperature
            if temperature == 0:
                rows.append(row)
                continue
            row = row / temperature
            if request.top_p is not None and request.top_p < 1:
                ordered, order = row.sort(descending=True)
                probabilities = ordered.softmax(-1)
                # The first token at which the sum passes top_p still belongs to the nucleus.
                outside = probabilities.cumsum(-1) - probabilities >= request.top_p
                row = row.masked_fill(torch.zeros_like(outside).scatter(0, order, outside), -float("inf"))
            noise = torch.rand(row.shape, generator=generator, dtype=torch.float64).clamp_min(1e-300)
            rows.append(row - torch.log(-torch.log(noise)).to(row.dtype).to(self._device))
        return torch.stack(rows)

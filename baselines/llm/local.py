"""A checkpoint on this machine: through vLLM where it is installed and there is a GPU, else through transformers.

Requests of several threads are put into one batch. Every row draws from a generator of its own, so that an answer depends
on its request and seed and not on who happened to share its batch.
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

from kbx_env.baselines.llm.chat import Ask, CallFailed, Finish, Reply
from kbx_env.baselines.llm.conversation import Conversation

from kbx_env.errors import KbxError, UsageError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.*")
_LOADING = threading.Lock()
"""Loading sets torch's default device for the whole process: two checkpoints at a time spoil each other."""
_GATHER = 0.05
"""Seconds for which a batch waits for more requests."""


class LocalModel:
    """Answers like a server. The checkpoint is checked at once and loaded with the first request."""

    def __init__(self, folder: str, device: str | None = None, batch: int = 8) -> None:
        """A model.

        Args:
            folder: with config.json, weights, tokenizer and chat template.
            device: of torch; ``None`` takes a GPU where there is one.
            batch: requests at a time.

        Raises:
            UsageError: not a checkpoint, one without tokenizer or template, no transformers, or no such device.
        """
        self.model, self._folder, self._batch = folder, Path(folder), batch
        self._tokenizer = tokenizer_of(self._folder)
        self._talk = Conversation(self._tokenizer) if self._tokenizer.chat_template is not None else None
        self._device = _device(device)
        self._todo: queue.Queue[tuple[Ask, Future[Reply]] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def complete(self, ask: Ask) -> Reply:
        """One answer."""
        future: Future[Reply] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="model", daemon=True)
                self._thread.start()
        self._todo.put((ask, future))
        return future.result()

    def close(self) -> None:
        """End the worker; its memory goes with the process."""
        self._todo.put(None)

    @property
    def tokenizer(self) -> Any:
        """Of the checkpoint."""
        return self._tokenizer

    def prompt_ids(self, ask: Ask) -> list[int]:
        """The tokens of a request, by the checkpoint's own template.

        Raises:
            UsageError: the tokenizer has no template, and the method none of its own.
        """
        if ask.ids is not None:
            return list(ask.ids)
        if self._tokenizer.chat_template is None:
            if ask.raw is None:
                raise UsageError(f"{self._folder}: the tokenizer has no chat template; save one with it (chat_template.jinja)")
            return list(self._tokenizer(ask.raw)["input_ids"])
        text = self._tokenizer.apply_chat_template([dict(m) for m in ask.messages], add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])  # the template writes them

    def _work(self) -> None:
        engine: Any = None
        while (first := self._todo.get()) is not None:
            jobs, end = [first], time.monotonic() + _GATHER
            while len(jobs) < self._batch and (left := end - time.monotonic()) > 0:
                try:
                    more = self._todo.get(timeout=left)
                except queue.Empty:
                    break
                if more is None:
                    self._todo.put(None)
                    break
                jobs.append(more)
            try:
                if engine is None:
                    with _LOADING:
                        engine = _engine(self._folder, self._tokenizer, self._device)
                self._answer(engine, jobs)
            except BaseException as e:
                error = e if isinstance(e, KbxError) else CallFailed("local", f"{type(e).__name__}: {e}", again=False)
                for _, future in jobs:
                    if not future.done():
                        future.set_exception(error)

    def _answer(self, engine: Any, jobs: list[tuple[Ask, Future[Reply]]]) -> None:
        fits = []
        for ask, future in jobs:
            ids = self.prompt_ids(ask)
            if engine.most is not None and len(ids) >= engine.most:
                text = f"a prompt of {len(ids)} tokens; the model takes {engine.most} with the answer"
                future.set_exception(CallFailed("too_long", text, again=False))
            else:
                fits.append((ask, future, ids, "" if self._talk is None else self._talk.begun(ask.messages)))
        start = time.monotonic()
        made = engine([a for a, *_ in fits], [ids for _, _, ids, _ in fits]) if fits else []
        for (ask, future, ids, begun), (tokens, ended) in zip(fits, made, strict=True):
            text, stopped = _cut(self._tokenizer.decode(tokens, skip_special_tokens=True), ask.stop)
            text = begun + text
            finish = Finish.STOP if ended or stopped else Finish.LENGTH
            took = time.monotonic() - start
            future.set_result(Reply(text, finish, "", len(ids), len(tokens), None, self.model, took, tuple(tokens)))


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a checkpoint folder, which is looked over first: config, weights, tokenizer.

    Raises:
        UsageError: no such folder, one that lacks any of them, no transformers, or a tokenizer that cannot be loaded.
    """
    if not folder.is_dir():
        raise UsageError(f"no checkpoint folder {str(folder)!r}; models are not fetched from a hub: give a folder on this machine")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is no checkpoint: it has no config.json (save it with save_pretrained)")
    weights = ("*.safetensors", "pytorch_model*.bin")
    if not any(any(folder.glob(w)) for w in weights):
        raise UsageError(f"{folder} is no checkpoint: it has no weights ({' or '.join(weights)})")
    # Without these transformers makes an empty tokenizer of the model's kind, and says nothing.
    if not any(any(folder.glob(t)) for t in _TOKENIZERS):
        raise UsageError(f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}); save it beside the model")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise UsageError('local checkpoints need transformers: pip install "kbx_env[trl]"') from e
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    except Exception as e:
        raise UsageError(f"{folder}: no usable tokenizer: {type(e).__name__}: {str(e)[:300]}; save it beside the model") from e


def _device(name: str | None) -> str:
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as e:
        raise UsageError(f"--device {chosen!r}: {str(e).splitlines()[0]}; use --device cpu") from e
    return chosen


def _cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    found = [i for s in stop if (i := text.find(s)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def _engine(folder: Path, tokenizer: Any, device: str) -> Any:
    """A function from requests and their tokens to (new tokens, whether the model ended by itself)."""
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
        self.most: int | None = int(self._llm.llm_engine.model_config.max_model_len)

    def __call__(self, asks: list[Ask], prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=a.max_tokens, temperature=1.0 if a.temperature is None else a.temperature, top_p=a.top_p or 1.0,
                seed=a.seed, stop=list(a.stop) or None,
            ) for a in asks
        ]  # fmt: skip
        made = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [(list(m.outputs[0].token_ids), m.outputs[0].finish_reason == "stop") for m in made]


class _Transformers:
    def __init__(self, folder: Path, tokenizer: Any, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._torch, self._device = torch, device
        dtype = "auto" if device != "cpu" else torch.float32  # half precision is slow on CPUs, where it works at all
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model = model.to(device).eval()
        own = self._model.generation_config.eos_token_id
        ends = own if isinstance(own, list) else [own]
        self._ends = {e for e in (*ends, tokenizer.eos_token_id) if e is not None}
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self._ends, default=0)
        self._config = GenerationConfig
        self.most: int | None = getattr(self._model.config, "max_position_embeddings", None)

    def __call__(self, asks: list[Ask], prompts: list[list[int]]) -> list[tuple[list[int], bool]]:
        torch, width = self._torch, max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        longest = max(a.max_tokens for a in asks)
        longest = min(longest, self.most - width) if self.most is not None else longest
        ends = sorted(self._ends) or None
        config = self._config(max_new_tokens=longest, do_sample=False, eos_token_id=ends, pad_token_id=self._pad)
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, generation_config=config, logits_processor=[_Draw(asks, self._device)]
            )
        answers = []
        for ask, row in zip(asks, out[:, width:].tolist(), strict=True):
            end = next((i for i, t in enumerate(row) if t in self._ends), None)
            made = row if end is None else row[:end]
            answers.append((made[: ask.max_tokens], end is not None and end <= ask.max_tokens))
        return answers


class _Draw:
    """Samples by adding Gumbel noise of the row's own generator: the greedy choice is then a draw from the distribution."""

    def __init__(self, asks: list[Ask], device: str) -> None:
        import torch

        self._torch, self._asks = torch, asks
        self._generators = [torch.Generator("cpu").manual_seed(a.seed or 0) for a in asks]
        self._device = device

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        torch, rows = self._torch, []
        for ask, generator, row in zip(self._asks, self._generators, scores.float()):
            # Servers take 1 where a request names no temperature.
            temperature = 1.0 if ask.temperature is None else ask.temperature
            if temperature == 0:
                rows.append(row)
                continue
            row = row / temperature
            if ask.top_p is not None and ask.top_p < 1:
                ordered, order = row.sort(descending=True)
                shares = ordered.softmax(-1)
                out = shares.cumsum(-1) - shares >= ask.top_p  # the first that passes the limit stays
                row = row.masked_fill(torch.zeros_like(out).scatter(0, order, out), -float("inf"))
            noise = torch.rand(row.shape, generator=generator, dtype=torch.float64).clamp_min(1e-300)
            rows.append(row - torch.log(-torch.log(noise)).to(row.dtype).to(self._device))
        return torch.stack(rows)

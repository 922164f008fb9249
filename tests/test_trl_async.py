"""TRL's asynchronous trainer with our rewards and tools: its own trainer, its own worker process and its own data path. What
needs a GPU has a stand-in: the vLLM server, the transfer of weights to it, and the attention kernel."""

from __future__ import annotations

import functools
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl.experimental.async_grpo")
pytest.importorskip("omegaconf")
pytest.importorskip("aiohttp")
import torch  # noqa: E402
from kbx_env.train import models  # noqa: E402
from service_stand_in import by_word  # noqa: E402

from kbx_env.trl import AsyncKernelReward, KernelReward, KernelTools, prompts  # noqa: E402

WRONG = 0.1 + 0.3 * 0.5
"""What the default preset pays for a kernel that compiles and passes half of the telling cases."""


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does; completions are random tokens."""

    vocab = 500

    def do_GET(self) -> None:
        self._reply({"data": [{"max_model_len": 4096}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = [random.randrange(self.vocab) for _ in range(asked["max_tokens"])]
        self._reply({"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": [-5.0] * len(tokens)}}]})

    def _reply(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class NoTransfer:
    """Sends no weights."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Iterator[Any]) -> None:
        for _ in iterator:
            pass


def _attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: Any = None, **more: Any) -> Any:
    """Do what ``flash_attn_varlen_func`` does, one segment after another."""
    found = []
    for (a, b), (c, d) in zip(zip(cu_q[:-1], cu_q[1:], strict=True), zip(cu_k[:-1], cu_k[1:], strict=True), strict=True):
        q1, k1, v1 = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        k1, v1 = (x.repeat_interleave(q1.shape[0] // x.shape[0], 0) for x in (k1, v1))
        mask = torch.ones(q1.shape[1], k1.shape[1], dtype=torch.bool).tril(k1.shape[1] - q1.shape[1])
        out = torch.nn.functional.scaled_dot_product_attention(q1, k1, v1, attn_mask=mask, scale=softmax_scale)
        found.append(out.transpose(0, 1))
    return torch.cat(found)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda *_, **__: True)
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=_attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks CUDA for its name
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["reward", "asynchronous reward", "tool"])
def test_steps_of_asynchronous_grpo(kind: str, vllm: str, tmp_path: Path) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    model = models.build(models.Build(str(tmp_path / "tiny"), hidden=32, layers=1, heads=2, vocab=600, context=4096))
    args = AsyncGRPOConfig(
        str(tmp_path), max_steps=2, num_generations=2, per_device_train_batch_size=2, max_completion_length=8, use_cpu=True,
        report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, bf16=False, gradient_checkpointing=False,
        vllm_server_base_url=vllm, max_inflight_tasks=2, dtype="float32",
    )  # fmt: skip
    reward = (AsyncKernelReward if kind == "asynchronous reward" else KernelReward)(backend="cpu", workers=1, grade=by_word)
    paid: dict[str, Any] = {"reward_funcs": reward}
    if kind == "tool":
        paid = {"environment_factory": functools.partial(KernelTools, reward)}
    trainer = AsyncGRPOTrainer(
        str(model), args=args, train_dataset=prompts(tasks="logspace", backend="cpu"), weight_transfer=NoTransfer(), **paid
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    name = "KernelTools" if kind == "tool" else "kernel_reward"
    assert len(lines) == 2 and lines[0][f"rewards/{name}"] == pytest.approx(WRONG)

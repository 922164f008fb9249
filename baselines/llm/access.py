"""Which model stands behind a policy, as a command line says it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field

from kbx_env.baselines.llm.caller import Caller, Limits
from kbx_env.baselines.llm.chat import Server
from kbx_env.baselines.llm.ledger import Budget, Ledger

from kbx_env.errors import UnknownName, UsageError

LOCAL = "hf:"
"""Begins the name of a model that is a folder on this machine."""
APIS = ("auto", "openai", "completions", "anthropic")


@dataclass(frozen=True)
class Access:
    """How to reach a model, and how much of it may be used. Keys come from the environment only."""

    model: str | None = None
    """The server's name for the model, or ``hf:FOLDER`` for a local checkpoint."""
    base_url: str | None = None
    api: str = "auto"
    """auto (Anthropic's for the policy claude without an address, else OpenAI's), openai, completions or anthropic."""
    key_env: str | None = None
    """The environment variable with the key; by default the API's usual one."""
    temperature: float | None = None
    """In place of the method's own; ``None`` keeps that."""
    max_tokens: int | None = None
    """Likewise, for an answer with its thinking."""
    samples: int = 1
    seed: int = 0
    send_seed: bool = True
    stall: float = 300.0
    """Seconds without a byte from the server after which a call has failed."""
    wall: float = 1800.0
    """Seconds for one call."""
    device: str | None = None
    """Of a local checkpoint: cpu, cuda, ...; ``None`` takes a GPU where there is one."""
    limits: Limits = field(default_factory=Limits)
    ledger: Ledger = field(default_factory=Ledger, compare=False)
    """Shared by all policies made with this access."""

    def caller(self, policy: str, model: str | None = None, api: str | None = None) -> Caller:
        """A caller for one policy.

        Args:
            policy: its name, for errors.
            model: in place of ``self.model``.
            api: what ``auto`` means for this policy; OpenAI's by default.

        Raises:
            UsageError: no model is named, or it cannot be reached as described.
        """
        name = model or self.model
        if not name:
            raise UsageError(f"policy {policy!r} needs a model: --model NAME (with --base-url URL), or --model hf:FOLDER")
        server, key = self._server(name, api)
        return Caller(server, self.limits, self.ledger, [key] if key else [], self.seed)

    def _server(self, name: str, api: str | None) -> tuple[Server, str | None]:
        if name.startswith(LOCAL):
            from kbx_env.baselines.llm.local import LocalModel

            return LocalModel(name.removeprefix(LOCAL), device=self.device, batch=self.limits.concurrency), None
        if self.api not in APIS:
            raise UnknownName("API", self.api, APIS)
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url {self.base_url!r}: give an address such as http://127.0.0.1:8000/v1")
        chosen = self.api if self.api != "auto" else (api or "openai") if self.base_url is None else "openai"
        usual = "ANTHROPIC_API_KEY" if chosen == "anthropic" else "OPENAI_API_KEY"
        key = os.environ.get(self.key_env or usual)
        if self.key_env and not key:
            raise UsageError(f"--api-key-env {self.key_env!r}: that variable is not set")
        if chosen == "anthropic":
            from kbx_env.baselines.llm.anthropic_api import AnthropicServer

            return AnthropicServer(name, self.base_url, key, stall=self.stall, wall=self.wall), key
        if self.base_url is None and not key:
            raise UsageError(f"no key for OpenAI's API: set {usual}, or give --base-url URL of another server")
        from kbx_env.baselines.llm.openai_api import OpenAIServer

        completions = chosen == "completions"
        made = OpenAIServer(
            name, self.base_url, key, stall=self.stall, wall=self.wall, completions=completions, seeded=self.send_seed
        )
        return made, key


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of `Access` on a command line."""
    g = p.add_argument_group("models", "for policies that ask a language model; keys are read from the environment only")
    g.add_argument("--model", help="name of the model on its server, or hf:FOLDER for a local checkpoint")
    g.add_argument("--base-url", help="address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    g.add_argument("--api", default="auto", help="auto, openai, completions (prompts rendered here) or anthropic")
    g.add_argument("--api-key-env", help="environment variable with the key (OPENAI_API_KEY, ANTHROPIC_API_KEY)")
    g.add_argument("--samples", type=int, default=1, help="independent answers to each task, for pass@k (default: 1)")
    g.add_argument("--temperature", type=float, help="in place of the method's own")
    g.add_argument("--max-tokens", type=int, help="in place of the method's own")
    g.add_argument("--policy-seed", type=int, default=0, help="seed of sampling (default: 0)")
    g.add_argument("--no-send-seed", action="store_true", help="for servers that refuse the parameter")
    g.add_argument("--concurrency", type=int, default=8, help="calls at a time (default: 8)")
    g.add_argument("--attempts", type=int, default=6, help="of one call before the server is said to have failed (6)")
    g.add_argument("--patience", type=float, default=2.0, help="seconds before the second attempt, doubled for each more (2)")
    g.add_argument("--per-minute", type=int, help="attempts a minute")
    g.add_argument("--stall", type=float, default=300.0, help="seconds without a byte until a call has failed (300)")
    g.add_argument("--call-wall", type=float, default=1800.0, help="seconds for one call (1800)")
    g.add_argument("--budget-calls", type=int, help="budget: stop asking after so many calls")
    g.add_argument("--budget-tokens", type=int, help="budget: stop asking after so many tokens, prompts included")
    g.add_argument("--budget-dollars", type=float, help="budget: stop asking after so many dollars")
    g.add_argument("--prices", help="dollars per million tokens, IN,OUT, where the server tells no cost")
    g.add_argument("--device", help="of a local checkpoint: cpu, cuda (default: a GPU where there is one)")


def from_args(a: argparse.Namespace) -> Access:
    """The access that a command line describes.

    Raises:
        UsageError: a number that is out of its range.
    """
    least = {
        "samples": 1, "concurrency": 1, "attempts": 1, "patience": 0, "per_minute": 1, "stall": 0.001, "call_wall": 0.001,
        "budget_calls": 0, "budget_tokens": 0, "budget_dollars": 0, "temperature": 0, "max_tokens": 1,
    }  # fmt: skip
    for name, low in least.items():
        value = getattr(a, name)
        if value is not None and not low <= value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; at least {low}")
    if a.budget_dollars is not None and a.prices is None and a.base_url is None:
        raise UsageError("--budget-dollars needs --prices IN,OUT (dollars per million tokens): this API tells no cost")
    limits = Limits(a.concurrency, a.attempts, a.patience, a.per_minute)
    budget = Budget(a.budget_calls, a.budget_tokens, a.budget_dollars, _prices(a.prices))
    return Access(
        a.model, a.base_url, a.api, a.api_key_env, a.temperature, a.max_tokens, a.samples, a.policy_seed,
        not a.no_send_seed, a.stall, a.call_wall, a.device, limits, Ledger(budget),
    )  # fmt: skip


def _prices(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        into, out = (float(part) for part in text.split(","))
    except ValueError:
        into = out = -1.0
    if not (0 <= into < float("inf") and 0 <= out < float("inf")):
        raise UsageError(f"--prices is {text!r}; dollars per million tokens, IN,OUT, such as 0.27,1.10")
    return into, out


CALLS = "calls.sqlite"
"""The record of calls in a run's folder."""

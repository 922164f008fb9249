"""Access to a model for policies: the options of command lines, and the clients made from them."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field

from kbx_env.baselines.llm.caller import Caller, Limits
from kbx_env.baselines.llm.chat import Server
from kbx_env.baselines.llm.ledger import Budget, Ledger

from kbx_env.errors import UnknownName, UsageError

LOCAL = "hf:"
"""Prefix of a model's name that stands for a checkpoint folder on this machine."""
APIS = ("auto", "openai", "completions", "anthropic")
CALLS = "calls.sqlite"
"""File name of the record of calls in the folder of a run."""


@dataclass(frozen=True)
class Access:
    """How a policy reaches a model, and how much of it it may use. Keys are read from the environment only."""

    model: str | None = None
    """The model's name on its server, or ``hf:FOLDER`` for a local checkpoint."""
    base_url: str | None = None
    """The server's address; ``None`` for the API's own."""
    api: str = "auto"
    """``openai``, ``completions``, ``anthropic``, or ``auto``: ``openai`` with an address, else the policy's API."""
    key_env: str | None = None
    """The environment variable with the key; by default ``OPENAI_API_KEY`` or ``ANTHROPIC_API_KEY``."""
    temperature: float | None = None
    """Replaces the method's temperature; ``None`` keeps it."""
    max_tokens: int | None = None
    """Replaces the method's limit on the tokens of an answer, thinking included; ``None`` keeps it."""
    samples: int = 1
    """Independent answers to each task."""
    seed: int = 0
    """From which the seeds of all calls are derived."""
    send_seed: bool = True
    """Whether the server gets the seed of a call."""
    stall: float = 300.0
    """Seconds without a byte from the server after which an attempt has failed."""
    wall: float = 1800.0
    """Seconds after which an attempt has failed."""
    device: str | None = None
    """Torch device of a local checkpoint; ``None`` for a GPU if there is one, else the CPU."""
    limits: Limits = field(default_factory=Limits)
    """Limits on the load that the server gets."""
    ledger: Ledger = field(default_factory=Ledger, compare=False)
    """Accounts for the calls of all policies that are made with this access."""

    def caller(self, policy: str, model: str | None = None, api: str | None = None) -> Caller:
        """Make a caller for a policy.

        Args:
            policy: its name, for errors.
            model: the model's name, in place of ``self.model``.
            api: the API that ``auto`` means for this policy where there is no address; by default ``openai``.

        Returns:
            A caller whose server has not been asked yet.

        Raises:
            UnknownName: no such API.
            UsageError: no model is named, the key or a package is missing, or the address is invalid.
        """
        name = model or self.model
        if not name:
            raise UsageError(
                f"policy {policy!r} needs a model: --model NAME (with --base-url URL), or --model hf:FOLDER"
            )
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
        usual_env = "ANTHROPIC_API_KEY" if chosen == "anthropic" else "OPENAI_API_KEY"
        key = os.environ.get(self.key_env or usual_env)
        if self.key_env and not key:
            raise UsageError(f"--api-key-env {self.key_env!r}: this environment variable is not set")
        if chosen == "anthropic":
            from kbx_env.baselines.llm.anthropic_api import AnthropicServer

            return AnthropicServer(name, self.base_url, key, stall=self.stall, wall=self.wall), key
        if self.base_url is None and not key:
            raise UsageError(f"no key for OpenAI's API: set {usual_env}, or give --base-url URL of another server")
        from kbx_env.baselines.llm.openai_api import OpenAIServer

        completions = chosen == "completions"
        server = OpenAIServer(
            name, self.base_url, key, stall=self.stall, wall=self.wall, completions=completions, seeded=self.send_seed
        )
        return server, key


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options of ``Access`` to a parser."""
    g = p.add_argument_group(
        "models", "for policies that ask a language model; keys are read from the environment only"
    )
    g.add_argument("--model", help="name of the model on its server, or hf:FOLDER for a local checkpoint")
    g.add_argument("--base-url", help="address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    g.add_argument("--api", default="auto", help="auto, openai, completions (prompts rendered here) or anthropic")
    g.add_argument("--api-key-env", help="environment variable with the key (OPENAI_API_KEY, ANTHROPIC_API_KEY)")
    g.add_argument("--samples", type=int, default=1, help="independent answers to each task, for pass@k (default: 1)")
    g.add_argument("--temperature", type=float, help="sampling temperature, in place of the method's own")
    g.add_argument("--max-tokens", type=int, help="most tokens of an answer, in place of the method's own limit")
    g.add_argument("--policy-seed", type=int, default=0, help="seed of sampling (default: 0)")
    g.add_argument("--no-send-seed", action="store_true", help="send no seed, for servers that refuse the parameter")
    g.add_argument("--concurrency", type=int, default=8, help="calls at the same time (default: 8)")
    g.add_argument("--attempts", type=int, default=6, help="attempts at one call before it has failed (default: 6)")
    g.add_argument(
        "--patience", type=float, default=2.0,
        help="seconds before the second attempt, doubled for each further one (default: 2)",
    )  # fmt: skip
    g.add_argument("--per-minute", type=int, help="most attempts a minute (default: no limit)")
    g.add_argument("--stall", type=float, default=300.0, help="seconds without a byte until an attempt fails (300)")
    g.add_argument("--call-wall", type=float, default=1800.0, help="seconds after which an attempt fails (1800)")
    g.add_argument("--budget-calls", type=int, help="budget: stop asking after so many calls")
    g.add_argument("--budget-tokens", type=int, help="budget: stop asking after so many tokens, prompts included")
    g.add_argument("--budget-dollars", type=float, help="budget: stop asking after so many dollars")
    g.add_argument("--prices", help="dollars per million tokens, IN,OUT, for servers that report no cost")
    g.add_argument("--device", help="torch device of a local checkpoint (default: cuda if there is a GPU, else cpu)")


def from_args(a: argparse.Namespace) -> Access:
    """Make an access from the parsed options of ``add_arguments``.

    Args:
        a: the options.

    Returns:
        The access, with a new ledger.

    Raises:
        UsageError: a number is out of its range, or a budget in dollars has no prices.
    """
    minimum = {
        "samples": 1, "concurrency": 1, "attempts": 1, "patience": 0, "per_minute": 1, "stall": 0.001,
        "call_wall": 0.001, "budget_calls": 0, "budget_tokens": 0, "budget_dollars": 0, "temperature": 0, "max_tokens": 1,
    }  # fmt: skip
    for name, low in minimum.items():
        value = getattr(a, name)
        if value is not None and not low <= value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; a number of at least {low}")
    if a.budget_dollars is not None and a.prices is None and a.base_url is None:
        raise UsageError(
            "--budget-dollars needs --prices IN,OUT (dollars per million tokens): this API reports no cost"
        )
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
        input_price, output_price = (float(part) for part in text.split(","))
    except ValueError:
        input_price = output_price = -1.0
    if not (0 <= input_price < float("inf") and 0 <= output_price < float("inf")):
        raise UsageError(f"--prices is {text!r}; dollars per million tokens, IN,OUT, such as 0.27,1.10")
    return input_price, output_price


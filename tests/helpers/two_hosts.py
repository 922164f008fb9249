"""Two hosts on one machine: network namespaces, joined by a switch in a third one, whose link can be cut. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SUBNET = "10.213.7."
"""Addresses of the hosts; they exist in the namespaces only."""


@dataclass(frozen=True)
class Hosts:
    """The trainer, the grading machine and the switch between them.

    Attributes:
        prefix: of the names of the namespaces.
        trainer: address of the trainer.
        grader: address of the grading machine.
    """

    prefix: str
    trainer: str = SUBNET + "1"
    grader: str = SUBNET + "2"

    def start(self, host: str, command: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """Start a process on a host.

        Args:
            host: ``trainer`` or ``grader``.
            command: the command line.
            **more: for ``subprocess.Popen``.

        Returns:
            The process itself: ``ip netns exec`` replaces itself by the command.
        """
        return subprocess.Popen(["ip", "netns", "exec", f"{self.prefix}-{host}", *command], **more)

    def cut(self) -> None:
        """Pull the grading machine's cable out of the switch. Neither host notices: both still have a carrier."""
        _ip("-n", f"{self.prefix}-switch", "link", "set", "grader", "nomaster")

    def mend(self) -> None:
        """Plug the cable in again."""
        _ip("-n", f"{self.prefix}-switch", "link", "set", "grader", "master", "switch")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


def _build(made: Hosts, spaces: Sequence[str]) -> None:
    for space in spaces:
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "lo", "up")
    switch = spaces[0]
    _ip("-n", switch, "link", "add", "switch", "type", "bridge")
    _ip("-n", switch, "link", "set", "switch", "up")
    for name, address in (("trainer", made.trainer), ("grader", made.grader)):
        space = f"{made.prefix}-{name}"
        _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", switch)
        _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", switch, "link", "set", name, "up")
        _ip("-n", switch, "link", "set", name, "master", "switch")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make the hosts, and remove them at the end of the block.

    Raises:
        OSError: this machine has no ``ip``, or this user may not make network namespaces.
    """
    made = Hosts(f"kbx{os.getpid()}")
    spaces = [f"{made.prefix}-{name}" for name in ("switch", "trainer", "grader")]
    try:
        try:
            _build(made, spaces)
        except subprocess.CalledProcessError as e:
            raise OSError(f"cannot make network namespaces: {e.stderr.decode(errors='replace').strip()}") from e
        yield made
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=30)

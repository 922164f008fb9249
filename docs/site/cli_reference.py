"""The reference of the command line, made from the parsers of ``kbx`` and from the settings of the training scripts."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

from kbx_env.train import settings

from kbx_env import __main__ as kbx
from kbx_env.cli import scripts

HEAD = """# Command line

`kbx` is short for `python -m kbx_env`. This page is made from the parsers of the commands, which also print it:
`kbx --help`, `kbx COMMAND --help`. Bad usage ends with exit status 2 and one line that names the accepted values.

"""
EVAL = """## Scripts of `eval/`

`kbx eval NAME` runs `eval/NAME.py`.

"""
TRAIN = """## Scripts of `train/`

`kbx train NAME [CONFIG.yaml] [key=value ...]` runs `train/NAME.py`. The tables list the keys of the settings; values of
the command line override the file, and the file overrides the defaults ([training](../training.md)).

"""


def page() -> str:
    """Return the page as Markdown."""
    parser = kbx._parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    about = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    parts = [HEAD, "| command | what it does |\n|---|---|\n"]
    parts += [f"| [`kbx {name}`](#kbx-{name}) | {_cell(about[name])} |\n" for name in commands.choices]
    for name, command in commands.choices.items():
        if name in scripts.FOLDERS:
            parts.append(f"\n## kbx {name}\n\n{about[name].capitalize()}: [the list](#scripts-of-{name}).\n")
        elif name in scripts.COMMANDS:
            parts += ["\n", _section(f"kbx {name}", _of_script("eval", name), about[name], "##")]
        else:
            parts += ["\n", _section(f"kbx {name}", command, about[name], "##")]
    for folder, head in (("eval", EVAL), ("train", TRAIN)):
        parts += ["\n", head]
        for name, first in scripts.scripts(folder).items():
            if name not in scripts.DIRECT:
                parts += [_section(f"kbx {folder} {name}", _of_script(folder, name), first, "###"), "\n"]
    return "".join(parts)


class _Found(BaseException):
    """Carries a parser, or the class of the settings, out of a script that was asked for its help."""


def _of_script(folder: str, name: str) -> Any:
    """Return the parser of a script, or the dataclass of its settings: what would print the answer to ``--help``."""
    module = importlib.import_module(f"kbx_env.{folder}.{name.replace('-', '_')}")

    def found(described: Any, *_: Any) -> None:
        raise _Found(described)

    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", found),
        mock.patch.object(settings, "usage", found),
        mock.patch("sys.argv", [f"kbx {folder} {name}", "--help"]),
    ):
        try:
            module.main()
        except _Found as e:
            return e.args[0]
    raise RuntimeError(f"kbx {folder} {name} --help printed nothing")


def _section(title: str, described: Any, about: str, level: str) -> str:
    """Return the section of one command."""
    text = f"{level} {title}\n\n{_sentence(about)}\n\n"
    if not isinstance(described, argparse.ArgumentParser):
        return text + _table(["setting", "type", "default", "meaning"], [
            [f"`{name}`", f"`{kind}`", "required" if default == settings.MISSING else f"`{default!r}`", doc]
            for name, kind, default, doc in settings.described(described)
        ])  # fmt: skip
    nested = [a for a in described._actions if isinstance(a, argparse._SubParsersAction)]
    if nested:
        abouts = {choice.dest: choice.help or "" for choice in nested[0]._choices_actions}
        inner = [_section(f"{title} {n}", p, abouts.get(n, ""), level + "#") for n, p in nested[0].choices.items()]
        return text + "\n".join(inner)
    rows = [[_flags(a), _help(described, a)] for a in described._actions if not isinstance(a, argparse._HelpAction)]
    return text + (_table(["argument", "meaning"], rows) if rows else "It has no arguments.\n")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """Return a text as the cell of a table; outside code, brackets and stars are no Markdown."""
    pieces = text.replace("|", "\\|").replace("\n", " ").split("`")
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"([\[\]*_])", r"\\\1", pieces[i]).replace("<", "&lt;")
    return "`".join(pieces)


def _sentence(text: str) -> str:
    return _cell(text[:1].upper() + text[1:].rstrip(".") + ".")


def _flags(action: argparse.Action) -> str:
    """Return how an argument is written."""
    shown = action.metavar or (action.dest if not action.option_strings else action.dest.upper())
    if action.choices:
        shown = "{" + ",".join(map(str, action.choices)) + "}"
    value = "" if action.nargs == 0 else str(shown)
    if not action.option_strings:
        return f"`{value}`" + ("" if action.required else " (optional)")
    flags = ", ".join(f"`{flag} {value}`" if value else f"`{flag}`" for flag in action.option_strings)
    return flags + (" (required)" if action.required else "")


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the meaning of an argument, as ``--help`` prints it."""
    expand: Callable[[argparse.Action], str] = parser._get_formatter()._expand_help
    text = expand(action) if action.help else ""
    default = action.default
    plain = default not in (None, False, argparse.SUPPRESS, []) and not dataclasses.is_dataclass(default)
    return text if not plain or "default" in text else f"{text} (default: {default})"

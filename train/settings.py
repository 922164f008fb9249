"""Settings of the scripts in ``train/``: defaults of a dataclass, changed by a YAML file, changed by ``key=value``.

    SCRIPT [CONFIG.yaml] [key=value ...] [--help]

Settings are typed, and unknown ones are refused: a run that ignored a misspelt setting would not be the run that was asked for.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from kbx_env.errors import UnknownName, UsageError
from kbx_env.extras import install_hint

FILE = "settings.yaml"
"""File of the settings, in the folder of a run."""
MISSING: Any = "???"
"""Default of a setting that must be given."""
T = TypeVar("T")


def read(cls: type[T], argv: Sequence[str], description: str = "", install: str | None = None) -> T:
    """Read the settings of a command line.

    Args:
        cls: a dataclass; ``--help`` shows the docstring under each field.
        argv: the arguments, without the script's name.
        description: the first lines of ``--help``.
        install: the command that installs what the script needs, for the message where omegaconf is missing; by default that
            of the extra trl.

    Returns:
        An instance of the dataclass.

    Raises:
        UsageError: no such file, no YAML, a value of another type, a setting without a value, or omegaconf is missing.
        UnknownName: no such setting; names the nearest ones.
        SystemExit: after ``--help``.
    """
    if "--help" in argv or "-h" in argv:
        print(usage(cls, description))
        raise SystemExit(0)
    config = _omegaconf(install)
    files = [a for a in argv if "=" not in a]
    for word in files:
        if word.startswith("-"):
            raise UsageError(f"unknown option {word!r}; settings are written key=value, --help lists them")
    if len(files) > 1:
        raise UsageError(f"one YAML file at most, got {', '.join(files)}; settings are written key=value")
    given = config.structured(cls)
    for path in files:
        given = _merged(cls, given, _file(config, path), path)
    pairs = [a for a in argv if "=" in a]
    for pair in pairs:
        if not pair.partition("=")[0].strip():
            raise UsageError(f"{pair!r} names no setting; write key=value")
        one = _pair(cls, config, pair)
        given = _merged(cls, given, one, "the command line")
    try:
        # Resolved here, so that a bad ${...} is reported before anything slow starts.
        missing = sorted(config.missing_keys(given))
        config.resolve(given)
        made = None if missing else config.to_object(given)
    except Exception as e:
        raise UsageError(f"setting {getattr(e, 'full_key', None) or '?'!r}: {_line(e)}") from e
    if made is None:
        raise UsageError(f"no value for {', '.join(missing)}; write {' '.join(f'{m}=...' for m in missing)}, or in the YAML file")
    return made


def save(settings: Any, folder: str | Path) -> Path:
    """Write settings as a YAML file with which the same script repeats the run.

    Args:
        settings: the settings.
        folder: folder of the run.

    Returns:
        The file.
    """
    config = _omegaconf()
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(config.to_yaml(config.structured(settings)), encoding="utf-8")
    os.replace(part, path)
    return path


def usage(cls: type, description: str = "") -> str:
    """Return the text of ``--help``: every setting with its type, default and meaning.

    Args:
        cls: the dataclass of the settings.
        description: the first lines.

    Returns:
        The text.
    """
    usage = f"usage: {Path(sys.argv[0]).name} [CONFIG.yaml] [key=value ...] [--help]"
    lines = [description.strip(), "", usage, ""] if description else []
    lines += ["settings:"]
    for name, kind, default, doc in described(cls):
        shown = "required" if default == MISSING else f"default {default}"
        lines.append(f"  {name} ({kind}; {shown})")
        lines += textwrap.wrap(doc, 110, initial_indent="      ", subsequent_indent="      ") if doc else []
    return "\n".join(lines)


def config_of(cls: type[T], section: Mapping[str, Any], what: str = "trainer", **ours: Any) -> T:
    """Make a library's configuration from a section of the settings and from values of the script itself.

    Args:
        cls: a dataclass such as ``trl.SFTConfig``.
        section: the section, as the user wrote it.
        what: the section's name, for errors.
        **ours: values that the script sets, which the section must not have.

    Returns:
        An instance of the class.

    Raises:
        UnknownName: the class has no such field.
        UsageError: the section has a value of ``ours``, or the class refuses a value.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name, value in section.items():
        if name in ours:
            raise UsageError(f"{what}.{name} is set by the script; use its own settings (--help) instead")
        if name not in fields:
            raise UnknownName(f"setting of {what} ({cls.__name__})", name, set(fields) - set(ours))
        default = fields[name].default
        if isinstance(value, str) and isinstance(default, int | float):
            raise UsageError(f"{what}.{name} is {value!r}; a {type(default).__name__} is needed, such as {default!r}")
    try:
        return cls(**{**section, **ours})
    except (TypeError, ValueError, ImportError) as e:
        raise UsageError(f"{what}: {cls.__name__} refuses these settings: {str(e)[:600]}") from e


def command(name: str, cls: type[T], description: str, run: Callable[[T], None], argv: Sequence[str] | None) -> int:
    """Run a script.

    Args:
        name: its name, for error messages.
        cls: the dataclass of its settings.
        description: the first lines of ``--help``.
        run: does the work, with the settings.
        argv: its arguments; ``None`` for those of the process.

    Returns:
        The exit status: 0 when done, 2 on bad usage, 130 when interrupted.
    """
    try:
        run(read(cls, sys.argv[1:] if argv is None else argv, description))
    except UsageError as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _omegaconf(install: str | None = None) -> Any:
    try:
        from omegaconf import OmegaConf
    except ImportError as e:
        raise UsageError(f"the scripts in train/ need omegaconf: {install or install_hint('trl')}") from e
    return OmegaConf


def _file(config: Any, path: str) -> Any:
    if not Path(path).is_file():
        raise UsageError(f"no settings file {path!r}; give a YAML file, or settings as key=value")
    try:
        loaded = config.load(path)
    except Exception as e:
        raise UsageError(f"{path} is no YAML: {_line(e)}") from e
    if not config.is_dict(loaded):
        raise UsageError(f"{path} holds no settings: its top level must be lines of key: value")
    return loaded


def _pair(cls: type, config: Any, pair: str) -> Any:
    """Parse one ``key=value``. The value of a text setting is not parsed as YAML, since a glob such as ``*`` is no YAML."""
    key, _, value = pair.partition("=")
    if {name: kind for name, kind, *_ in described(cls)}.get(key) in ("str", "str or null") and value not in ("null", "None"):
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        one = config.create({})
        config.update(one, key, value[1:-1] if quoted else value, force_add=True)
        return one
    try:
        return config.from_dotlist([pair])
    except Exception as e:
        raise UsageError(f"{pair!r} cannot be read: {_line(e)}; lists are [a,b], text with signs needs quotes") from e


def _merged(cls: type, base: Any, more: Any, where: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    try:
        return OmegaConf.merge(base, more)
    except (ConfigKeyError, ConfigAttributeError) as e:
        raise UnknownName(f"setting (in {where})", e.full_key, [name for name, *_ in described(cls)]) from e
    except (OmegaConfBaseException, ValueError, TypeError) as e:
        key = getattr(e, "full_key", None)
        kinds = {name: kind for name, kind, *_ in described(cls)}
        if key in kinds:
            got = OmegaConf.select(more, key, throw_on_resolution_failure=False)
            raise UsageError(f"setting {key!r} (in {where}) is {got!r}; accepted: {kinds[key]}") from e
        raise UsageError(f"settings in {where}: {_line(e)}") from e


def _line(e: BaseException) -> str:
    return " ".join(str(e).split())[:300]


def described(cls: type, prefix: str = "") -> list[tuple[str, str, Any, str]]:
    """Describe the settings of a script.

    Args:
        cls: the dataclass of the settings.
        prefix: begins their names.

    Returns:
        Dotted name, type, default and meaning of every setting.
    """
    found: list[tuple[str, str, Any, str]] = []
    hints, docs = get_type_hints(cls), _docs(cls)
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found += described(kind, f"{prefix}{f.name}.")
            continue
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        shown = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "").replace(" | None", " or null")
        found.append((prefix + f.name, shown, default, docs.get(f.name, "")))
    return found


def _docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of the class and of its base classes."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # a class without a source file has no docstrings of fields
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, text in zip(body, body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                    found[field.target.id] = inspect.cleandoc(text.value.value).replace("\n", " ")
    return found

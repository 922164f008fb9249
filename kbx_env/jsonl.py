"""Files of JSON lines (``*.jsonl``): one JSON value a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kbx_env.errors import UsageError


class NotJson(UsageError):
    """A line that holds no JSON value.

    Args:
        path: the file.
        number: of the line, from 1.
        reason: what is wrong with the line, without file and number.

    Attributes:
        reason: as given.
    """

    def __init__(self, path: str | Path, number: int, reason: str) -> None:
        super().__init__(f"{path}, line {number}: not JSON ({reason}); expected one JSON value a line")
        self.reason = reason


def encode(value: Any, *, ensure_ascii: bool = True, allow_nan: bool = True) -> str:
    """Return a value as one line of JSON, with the line break.

    Args:
        value: of plain JSON types.
        ensure_ascii: write other characters as escape sequences.
        allow_nan: write NaN and infinities, which other readers of JSON may refuse.

    Returns:
        The line.

    Raises:
        ValueError: a NaN or an infinity without ``allow_nan``.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=allow_nan) + "\n"


def append(path: str | Path, value: Any, *, ensure_ascii: bool = True, allow_nan: bool = True) -> None:
    """Append a line to a file, which is made if there is none.

    The line is written with one call to a file opened for appending: lines of several processes do not mix, and after a kill
    the line is there as a whole or not at all. After a line that was cut off all the same, as by a full disk, a new one begins.

    Args:
        path: the file.
        value: as for `encode`.
        ensure_ascii: as for `encode`.
        allow_nan: as for `encode`.
    """
    data = encode(value, ensure_ascii=ensure_ascii, allow_nan=allow_nan).encode()
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(file).st_size
        whole = size == 0 or os.pread(file, 1, size - 1) == b"\n"
        os.write(file, data if whole else b"\n" + data)
    finally:
        os.close(file)


def write(path: str | Path, values: Iterable[Any], *, ensure_ascii: bool = True, allow_nan: bool = True) -> None:
    """Write a file of lines; an earlier file is replaced once all are written, or stays as it is.

    Args:
        path: the file.
        values: as for `encode`, one for each line.
        ensure_ascii: as for `encode`.
        allow_nan: as for `encode`.
    """
    part = Path(path).with_name(f"{Path(path).name}.new")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(encode(v, ensure_ascii=ensure_ascii, allow_nan=allow_nan) for v in values)
    part.replace(path)


def numbered(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, text) of a file's lines that are not blank."""
    # Not splitlines(): it also breaks at U+2028 and form feeds, which JSON allows inside a string.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig", errors="replace").split("\n"), 1):
        if line.strip():
            yield number, line


def parse(path: str | Path, number: int, line: str) -> Any:
    """Return the value of a line.

    Args:
        path: the file, for the error.
        number: of the line, for the error.
        line: the text.

    Returns:
        The value.

    Raises:
        NotJson: the line holds no JSON value, or one that is nested too deep.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as e:
        raise NotJson(path, number, str(e)) from e


def read(path: str | Path, *, skip_broken: bool = False) -> list[Any]:
    """Return the values of a file's lines.

    Args:
        path: the file.
        skip_broken: leave out lines that hold no JSON value, such as one that was cut off.

    Returns:
        The values, in order.

    Raises:
        OSError: the file cannot be read.
        NotJson: a line holds no JSON value; the error names it.
    """
    found = []
    for number, line in numbered(path):
        try:
            found.append(parse(path, number, line))
        except NotJson:
            if not skip_broken:
                raise
    return found

"""A command line of train/: defaults, a file over them, key=value over both; every mistake is named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kbx_env.errors import UnknownName, UsageError

pytest.importorskip("omegaconf")
from kbx_env.train import settings  # noqa: E402


@dataclass
class Inner:
    depth: int = 2
    """How deep."""


@dataclass
class Demo:
    out: str = settings.MISSING
    """Where results
    are written."""
    rate: float = 0.5
    """Per second."""
    names: list[str] = field(default_factory=list)
    lora: dict[str, Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    limit: int | None = None


@dataclass
class Library:
    learning_rate: float = 1e-3
    output_dir: str = ""
    steps: int = 3

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError("steps must not be negative")


def test_a_file_goes_over_defaults_and_the_command_line_over_both(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("out: there\nrate: 2\ntrainer:\n  learning_rate: 1e-5\n  extra: {a: [1, 2]}\n")
    got = settings.read(Demo, [str(file), "rate=3", "inner.depth=7", "lora.r=16", "trainer.steps=9", "names=[a,b]"])
    assert isinstance(got, Demo) and (got.out, got.rate, got.inner, got.limit) == ("there", 3.0, Inner(7), None)
    assert got.lora == {"r": 16} and got.names == ["a", "b"]
    assert got.trainer == {"learning_rate": 1e-5, "extra": {"a": [1, 2]}, "steps": 9}, "free sections stay as they are"


@pytest.mark.parametrize("text", ["*", "gelu*,*sum*", "[a", "5", "a: b", "null x", "'*'"])
def test_text_is_taken_as_it_is(text: str, tmp_path: Path) -> None:
    got = settings.read(Demo, [f"out={text}"])
    assert got.out == text.strip("'") and settings.read(Demo, [str(settings.save(got, tmp_path))]) == got


def test_what_was_saved_repeats_the_run(tmp_path: Path) -> None:
    got = settings.read(Demo, ["out=x", "lora.r=4", "trainer.a.b=1e-3", "limit=5"])
    file = settings.save(got, tmp_path / "new")
    assert file.name == settings.FILE and settings.read(Demo, [str(file)]) == got


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], r"no value for out; write out=\.\.\."), (["out=x", "rate=fast"], "'rate'.*'fast'.*float"),
        (["out=x", "inner=3"], "inner|Inner"), (["out=x", "lora=3"], "'lora'.*dict"), (["nowhere.yaml"], "nowhere.yaml"),
        (["a.yaml", "b.yaml"], "one YAML file"), (["--rate", "out=x"], "--rate.*key=value"), (["=3"], "names no setting"),
        (["out=x", "names=[1"], "cannot be read"), (["out=${nothing}"], "out"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_error(argv: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        settings.read(Demo, argv)


@pytest.mark.parametrize(("key", "near"), [("outt", "out"), ("inner.dept", "inner.depth"), ("trainr", "trainer")])
def test_an_unknown_setting_names_the_known_ones(key: str, near: str) -> None:
    with pytest.raises(UnknownName, match=f"(?s){key}.*{near}"):
        settings.read(Demo, ["out=x", f"{key}=1"])


def test_a_file_that_is_no_settings_is_said(tmp_path: Path) -> None:
    for text, says in (("a: [1", "no YAML"), ("- 1\n- 2\n", "key: value"), ("rat: 1\n", "rat.*bad.yaml|bad.yaml.*rat")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(UsageError, match=says):
            settings.read(Demo, [str(tmp_path / "bad.yaml"), "out=x"])


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        settings.read(Demo, ["--help"], "Does things.")
    text = capsys.readouterr().out
    assert e.value.code == 0 and "Does things." in text
    assert "out (str; required)\n      Where results are written." in text
    assert "inner.depth (int; default 2)\n      How deep." in text
    assert "limit (int or null; default None)" in text


def test_main_prints_one_line_and_returns_2(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[Demo] = []
    assert settings.command("demo.py", Demo, "", ran.append, ["rate=1"]) == 2
    assert capsys.readouterr().err.startswith("demo.py: no value for out") and not ran
    assert settings.command("demo.py", Demo, "", ran.append, ["out=y"]) == 0 and ran[0].out == "y"


def test_a_free_section_becomes_the_librarys_own_configuration() -> None:
    made = settings.config_of(Library, {"learning_rate": 1}, output_dir="here")
    assert (made.learning_rate, made.output_dir) == (1, "here")
    with pytest.raises(UnknownName, match="learning_rat.*learning_rate"):
        settings.config_of(Library, {"learning_rat": 1})
    wrong = (({"output_dir": "x"}, "output_dir is set by"), ({"steps": "many"}, "'many'.*int"), ({"steps": -1}, "negative"))
    for section, says in wrong:
        with pytest.raises(UsageError, match=says):
            settings.config_of(Library, section, output_dir="here")

"""The images install what pyproject.toml asks for, from locks, as a user without privileges."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("report", "serve")
KINDS = ("cpu", "cuda")


def _locked(kind: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"docker/{kind}.lock").read_text(), re.MULTILINE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_holds_every_requirement(kind: str) -> None:
    locked, dockerfile = _locked(kind), (ROOT / f"docker/{kind}.Dockerfile").read_text()
    locked |= {"torch": version} if (version := "".join(re.findall(r"^ARG TORCH=(.*)", dockerfile, re.MULTILINE))) else {}
    for text in [*PROJECT["dependencies"], *(r for extra in EXTRAS for r in PROJECT["optional-dependencies"][extra])]:
        wanted = Requirement(text)
        version = locked.get(canonicalize_name(wanted.name))
        assert version and wanted.specifier.contains(version), f"{text}: docker/{kind}.lock has {version}; run docker/lock.sh"
    assert "setuptools" in locked, "the image builds kbx_env without build isolation"
    assert any(name.startswith("nvidia-cu") for name in locked) == (kind == "cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_every_package_of_a_lock_has_hashes(kind: str) -> None:
    text = re.sub(r"^#.*\n", "", (ROOT / f"docker/{kind}.lock").read_text(), flags=re.MULTILINE)
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) == len(_locked(kind)) > 40 and all("--hash=sha256:" in entry for entry in entries)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_pinned_and_unprivileged(kind: str) -> None:
    lines = (ROOT / f"docker/{kind}.Dockerfile").read_text().splitlines()
    assert "ARG PYTHON_DIGEST" in lines, "no digest is invented: the builder gives it"
    assert [x for x in lines if x.startswith("FROM")] == ["FROM python:3.11-slim-bookworm@${PYTHON_DIGEST}"]
    user, doctor = lines.index("USER grader"), lines.index("RUN kbx doctor")
    assert user < doctor and not any(x.startswith("USER") for x in lines[user + 1 :])
    assert any(x.startswith("HEALTHCHECK") and x.endswith('CMD ["kbx", "doctor"]') for x in lines)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for source in (word for x in lines if x.startswith("COPY") for word in x.split()[1:-1]):
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed or ("!docker/*.lock" in allowed and source.endswith(".lock"))

"""Build the distributions, check what they hold, install the wheel, and use it from another folder.

python .ci/check_package.py            lists of files, twine, and the commands that users begin with; about 20 s of CPU
python .ci/check_package.py --scripts  the help of every script of eval/ and train/ as well

Nothing is downloaded: the new environment finds the dependencies of kbx_env in the environment that runs this script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import site
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("kbx_env", "tasks", "rewards", "baselines", "train", "eval")
"""Folders that are installed; all but the first become subpackages of the first."""
BESIDE = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
"""Further files that a source distribution needs to be built from."""
MADE = re.compile(r"PKG-INFO|setup\.cfg|kbx_env\.egg-info/.*")
"""Files that setuptools adds to a source distribution."""
TASK = "math/abs"
"""The task that is graded: its expert takes the least time."""


def check_versions() -> str:
    """Compare the places that name the version, and the tag of the commit if it has one.

    Returns:
        The version.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, pattern in (("kbx_env/__init__.py", r'^__version__ = "(.*)"$'), ("CITATION.cff", r"^version: (.*)$")):
        found = re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
        if found != [version]:
            sys.exit(f"error: {name} has the version {', '.join(found) or 'none'}, pyproject.toml has {version}")
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for tag in (t for t in tags if re.match(r"v\d", t)):
        if tag != f"v{version}":
            sys.exit(f"error: the commit has the tag {tag}, pyproject.toml has the version {version}")
        if not re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
            sys.exit(f"error: the commit has the tag {tag}, but CHANGELOG.md has no section {version}")
    return version


def tree() -> set[str]:
    """Return the files of the installed folders, relative to the root; those that git ignores are not among them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *SOURCES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in listed if name and (ROOT / name).is_file()}


def compare(what: str, found: set[str], wanted: set[str]) -> None:
    """End with a message if a distribution holds other files than it should.

    Args:
        what: the distribution, for the message.
        found: files that it holds.
        wanted: files that it should hold.
    """
    parts = [("lacks", wanted - found), ("must not hold", found - wanted)]
    said = [f"{verb} {', '.join(sorted(names)[:20])}" for verb, names in parts if names]
    if said:
        sys.exit(f"error: the {what} {'; it '.join(said)}. pyproject.toml lists packages and package-data")


def build(folder: Path) -> Path:
    """Build both distributions and check them.

    Args:
        folder: where they are written.

    Returns:
        The path of the wheel, which is built from the source distribution.
    """
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    wheel, sdist = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)])
    files = tree()
    with tarfile.open(sdist) as archive:
        held = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    compare("source distribution", {name for name in held if not MADE.fullmatch(name)}, files | BESIDE)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    compare("wheel", held, {name if name.startswith("kbx_env/") else f"kbx_env/{name}" for name in files})
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new virtual environment.

    Args:
        wheel: the distribution.
        folder: of the new environment.

    Returns:
        The folder of its commands.
    """
    venv.create(folder, symlinks=True)
    commands = folder / "bin"
    python = str(commands / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", python]
    run([*pip, "install", "--no-index", "--no-deps", "--no-compile", str(wheel)])
    packages = next(folder.glob("lib/python*/site-packages"))
    # Folders that a .pth file names are searched last, and their own .pth files (an editable kbx_env) are not read.
    known = dict.fromkeys([*site.getsitepackages(), *(p for p in sys.path if p.endswith("site-packages"))])
    (packages / "dependencies.pth").write_text("\n".join(known) + "\n")
    # What messages about missing packages name: pip has to find kbx_env installed, for no index has it.
    hint = run([python, "-c", "from kbx_env.extras import install_hint; print(install_hint('client'))"], folder)
    run([*pip, *shlex.split(hint)[1:], "--no-index", "--no-deps"], folder)
    return commands


def run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command; end with its output if it fails.

    Args:
        command: program and arguments.
        cwd: the working folder; ``None`` for the current one.

    Returns:
        What it printed.
    """
    # Neither the clone nor the settings of the caller may help: the wheel has to stand for itself.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KBX_", "PYTHONPATH", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def use(commands: Path, folder: Path, scripts: bool) -> None:
    """Run the installed commands as a user would.

    Args:
        commands: folder of the installed commands.
        folder: an empty working folder.
        scripts: whether to ask every script for its help.
    """
    kbx = str(commands / "kbx")
    code = "import kbx_env, kbx_env.tasks; print(kbx_env.__file__, *kbx_env.tasks.__path__)"
    where = run([str(commands / "python"), "-c", code], folder)
    if any(not path.startswith(str(commands.parent)) for path in where.split()):
        sys.exit(f"error: the new environment uses {where.strip()} and not the wheel")
    (folder / "kernel.py").write_text(run([kbx, "expert", TASK], folder))
    graded = run([kbx, "grade", TASK, "kernel.py", "--backend", "cpu", "--targets", "sm_90"], folder)
    if not graded.startswith("correct"):
        sys.exit(f"error: kbx grade says of the expert of {TASK}:\n{graded}")
    run([kbx, "report", "--policy", "expert", "--backend", "cpu", "--split", "all", "--tasks", TASK, "--targets", "none",
         "--workers", "1", "--out", "report"], folder)  # fmt: skip
    report = json.loads((folder / "report/report.json").read_text())
    if [t["verdict"] for t in report["tasks"]] != ["correct"] or not (folder / "report/report.html").is_file():
        sys.exit(f"error: kbx report did not grade the expert of {TASK} as correct")
    run([kbx, "serve", "--help"], folder)
    run([kbx, "train", "grpo", "--help"], folder)
    for command in ("eval", "train") if scripts else ():
        for line in run([kbx, command, "--help"], folder).splitlines():
            if line.startswith("  "):
                run([kbx, command, line.split()[0], "--help"], folder)


def main() -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", action="store_true", help="also ask every script of eval/ and train/ for its help")
    a = parser.parse_args()
    version = check_versions()
    with tempfile.TemporaryDirectory(prefix="kbx-package-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        commands = install(wheel, folder / "venv")
        (folder / "elsewhere").mkdir()
        use(commands, folder / "elsewhere", a.scripts)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"kbx_env {version}: the distributions are whole and work elsewhere ({used.ru_utime + used.ru_stime:.0f} s of CPU)")


if __name__ == "__main__":
    main()

"""Makes the pictures of README.md: the top of a report, and a finding of the sanitizer as a terminal shows it.

    python docs/pictures/make.py      # about two minutes; needs Chromium and the extras report and dev

The report grades our expert kernels and recorded answers for the tasks below. The kernel of the finding is
``examples/kernels/exp_sqrt.py`` without its masks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TASKS = (
    "activation/gelu_fp16,convolution/conv2d,index/masked_select,loss/cross_entropy,math/softmax,math/exp_sqrt,"
    "normalization/batch_norm,optimizer/AdamW,pooling/adaptive_avg_pool2d,random/rand,reduce/argmax"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTH, HEIGHT = 1100, 900
COLUMNS = 108


def report(out: Path) -> None:
    """Write a report and photograph the top of its page as ``report.png``.

    Args:
        out: folder for the report.
    """
    from playwright.sync_api import sync_playwright

    argv = ["--policy", "expert", "--policy", "replay:baselines/samples/replay.jsonl", "--backend", "cpu", "--split", "all"]
    argv += ["--tasks", TASKS, "--targets", "none", "--workers", "2", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "kbx_env", "report", *argv], cwd=ROOT, check=True)
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto((out / "report.html").as_uri())
        page.screenshot(path=HERE / "report.png")
        browser.close()


def finding(folder: Path) -> None:
    """Grade a kernel that reads out of bounds, and draw what the terminal shows as ``finding.svg``.

    Args:
        folder: for the kernel's source.
    """
    kernel = folder / "kernel.py"
    kernel.write_text((ROOT / "examples/kernels/exp_sqrt.py").read_text().replace(", mask=inside", ""))
    command = ["grade", "math/exp_sqrt", kernel.name]
    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "kbx_env", *command], cwd=folder, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "seconds:" not in line]
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text(f"$ kbx {' '.join(command)}", style="bold"))
        console.print(Text.from_ansi("\n".join(lines)))
        svg = console.export_svg(title="kbx_env")
    # A picture must not ask another host for its font.
    (HERE / "finding.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S).replace("Fira Code, ", ""))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        finding(Path(made))
        report(Path(made) / "report")

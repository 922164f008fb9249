"""Plant three faults in a correct kernel, and read what the sanitizer finds.

    python examples/sanitizer_findings.py
"""

from pathlib import Path

import kbx_env

SOURCE = (Path(__file__).parent / "kernels/exp_sqrt.py").read_text()
FAULTS = {
    "no mask": (", mask=inside", ""),
    "all programs write the first block": ("tl.store(y + i", "tl.store(y + tl.arange(0, BLOCK)"),
    "reads its own output first": ("* 0.5)", "* 0.5) + 0.0 * tl.load(y + i, mask=inside)"),
}  # fmt: skip

if __name__ == "__main__":
    for what, (old, new) in FAULTS.items():
        outcome = kbx_env.grade("math/exp_sqrt", SOURCE.replace(old, new), backend="cpu", targets=())
        assert outcome.evidence is not None
        finding = outcome.evidence.findings[0]
        print(f"{what}: {finding.kind} in {finding.kernel}, line {finding.line}")
        print("   ", finding.text)

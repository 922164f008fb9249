"""Build a small model with random weights and a tokenizer trained on this project's own prompts and kernels.

    python train/build_model.py out=runs/model hidden=256 layers=6 heads=8 vocab=4096 context=8192
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kbx_env.train.models import Build, build, load
from kbx_env.train.settings import command, save


def run(b: Build) -> None:
    """Write the model and print how large it is."""
    folder = build(b)
    save(b, folder)
    model, tokenizer = load(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens, context {b.context}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when written, 2 on bad usage."""
    return command("build_model.py", Build, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())

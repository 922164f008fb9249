#!/usr/bin/env bash
# Writes docker/cpu.lock and docker/cuda.lock: every package of the images, with version and hashes. Needs uv.
#   docker/lock.sh [OPTION OF UV ...]      such as --upgrade
# torch itself is not in cpu.lock: the image takes the CPU build from PyTorch's own index (TORCH in cpu.Dockerfile).
# TORCH_WHEELS=FOLDER: where that index cannot be reached, a folder with the wheel of the CPU build.
set -euo pipefail
cd "$(dirname "$0")/.."
common=(pyproject.toml --extra report --extra serve --python-version 3.11 --python-platform x86_64-manylinux_2_28
  --generate-hashes --no-annotate --custom-compile-command docker/lock.sh --quiet "$@")
torch=$(sed -n 's/^ARG TORCH=//p' docker/cpu.Dockerfile)
# The CPU build needs no packages of NVIDIA.
from=(--torch-backend cpu)
[[ -z "${TORCH_WHEELS:-}" ]] || from=(--find-links "$TORCH_WHEELS")
uv pip compile "${common[@]}" "${from[@]}" --constraint <(echo "torch==$torch") --no-emit-package torch --output-file docker/cpu.lock
# torch of PyPI is the CUDA build.
uv pip compile "${common[@]}" --constraint <(echo "torch==${torch%+*}") --output-file docker/cuda.lock

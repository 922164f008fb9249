# kbx_env for the CUDA backend: timing, reports and the grading service on GPUs. docs/install.md has the commands.
#   docker build -f docker/cuda.Dockerfile --build-arg PYTHON_DIGEST=sha256:... -t kbx-env:cuda .
#   docker run --gpus all ...
# The digest fixes the base image. It has no default; `docker pull python:3.11-slim-bookworm` prints it.
# The base needs no CUDA: torch brings its libraries and Triton its assembler; the host has the driver (for CUDA 13: 580
# or newer) and the NVIDIA container toolkit.
ARG PYTHON_DIGEST
FROM python:3.11-slim-bookworm@${PYTHON_DIGEST}
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# What the container toolkit mounts: CUDA, and nvidia-smi with NVML.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Triton compiles its driver, a small C file, on the first use of a GPU.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# The packages first: they change less often than the source.
COPY docker/cuda.lock /src/docker/cuda.lock
RUN pip install --no-deps --require-hashes -r /src/docker/cuda.lock

COPY pyproject.toml MANIFEST.in README.md LICENSE /src/
COPY kbx_env /src/kbx_env
COPY tasks /src/tasks
COPY rewards /src/rewards
COPY baselines /src/baselines
COPY train /src/train
COPY eval /src/eval
# setuptools is in the lock, so the build downloads nothing.
RUN pip install --no-deps --no-build-isolation /src && pip check && rm -rf /src

RUN useradd --create-home grader
USER grader
WORKDIR /home/grader
# A build has no GPU: it fails where the CPU backend cannot grade, and the health check tells what the container has.
RUN kbx doctor
HEALTHCHECK --interval=10m --timeout=1m --start-period=1m CMD ["kbx", "doctor"]
ENTRYPOINT ["kbx"]
CMD ["doctor"]

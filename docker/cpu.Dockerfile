# kbx_env for the CPU backend: grading, reports and the grading service. docs/install.md has the commands.
#   docker build -f docker/cpu.Dockerfile --build-arg PYTHON_DIGEST=sha256:... -t kbx-env:cpu .
# The digest fixes the base image. It has no default; `docker pull python:3.11-slim-bookworm` prints it.
ARG PYTHON_DIGEST
FROM python:3.11-slim-bookworm@${PYTHON_DIGEST}
ARG TORCH=2.13.0+cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# The packages first: they change less often than the source. cpu.lock also holds what torch needs.
COPY docker/cpu.lock /src/docker/cpu.lock
RUN pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==${TORCH}" \
    && pip install --no-deps --require-hashes -r /src/docker/cpu.lock

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
# The build fails where the CPU backend cannot grade.
RUN kbx doctor
HEALTHCHECK --interval=10m --timeout=1m --start-period=1m CMD ["kbx", "doctor"]
ENTRYPOINT ["kbx"]
CMD ["doctor"]

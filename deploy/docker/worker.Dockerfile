# A worker: docker build -f deploy/docker/worker.Dockerfile -t fxlib-worker .
FROM python:3.11-slim AS build
WORKDIR /src
# Without this index, torch comes with several gigabytes of CUDA.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY fxlib fxlib
COPY workers workers
RUN python -m venv /opt/fxlib \
    && /opt/fxlib/bin/pip install --no-cache-dir --constraint constraints.txt . "./workers[otel]"

FROM python:3.11-slim
# libseccomp: trials filter system calls with it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libseccomp2=2.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /var/lib/fxlib --create-home fxlib
COPY --from=build /opt/fxlib /opt/fxlib
ENV PATH=/opt/fxlib/bin:$PATH
USER 10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-P", "-m", "fxlib_workers"]

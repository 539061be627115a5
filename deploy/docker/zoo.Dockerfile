# A zoo of models: docker build -f deploy/docker/zoo.Dockerfile --build-arg MODELS="pytorchcv==0.0.67" -t fxlib-zoo .
FROM python:3.11-slim AS build
WORKDIR /src
# Without this index, torch comes with several gigabytes of CUDA.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# What the factories of the manifest need, as pip takes it.
ARG MODELS=
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY fxlib fxlib
# hadolint ignore=SC2086
RUN python -m venv /opt/fxlib \
    && /opt/fxlib/bin/pip install --no-cache-dir --constraint constraints.txt . $MODELS

FROM python:3.11-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/fxlib --create-home fxlib \
    && install -d -o fxlib /runs
COPY --from=build /opt/fxlib /opt/fxlib
ENV PATH=/opt/fxlib/bin:$PATH
USER 10001
VOLUME /runs
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-P", "-m", "fxlib.cli", "zoo"]

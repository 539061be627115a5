# The service, and its dashboard (python -P -m fxlib.cli dashboard): docker build -f deploy/docker/service.Dockerfile -t fxlib-service .
FROM python:3.11-slim AS build
WORKDIR /src
# Without this index, torch comes with several gigabytes of CUDA.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY fxlib fxlib
COPY service service
RUN python -m venv /opt/fxlib \
    && /opt/fxlib/bin/pip install --no-cache-dir --constraint constraints.txt ".[dashboard]" "./service[postgres,otel,s3]"

FROM python:3.11-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/fxlib --create-home fxlib \
    && install -d -o fxlib /var/lib/fxlib-blobs
COPY --from=build /opt/fxlib /opt/fxlib
ENV PATH=/opt/fxlib/bin:$PATH \
    FXLIB_SERVE_DATA=/var/lib/fxlib \
    FXLIB_SERVE_LISTEN=0.0.0.0:8470 \
    FXLIB_SERVE_METRICS=0.0.0.0:8471
USER 10001
VOLUME /var/lib/fxlib
EXPOSE 8470 8471
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-P", "-m", "fxlib_service"]

"""The command line of the service."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fxlib.errors import FxlibError
from fxlib_service.config import Address, Config, Limits, Tls


def parse(arguments: Sequence[str] | None = None) -> Config:
    """Read the options.

    Raises:
        FxlibError: they contradict each other, or ask for what is not safe.
        SystemExit: they cannot be read, or help was asked for.
    """
    options = _parser().parse_args(arguments)
    if bool(options.tls_cert) != bool(options.tls_key):
        raise FxlibError("--tls-cert and --tls-key go together", where="--tls-cert")
    if options.client_ca and not options.tls_cert:
        raise FxlibError("needs --tls-cert and --tls-key", where="--client-ca")
    tls = Tls(certificate=options.tls_cert, key=options.tls_key, client_ca=options.client_ca)
    return Config(
        data=options.data,
        listen=options.listen,
        metrics=options.metrics,
        database_url=options.database,
        tls=tls if options.tls_cert else None,
        insecure=options.insecure,
        policy=options.policy,
        ready_file=options.ready_file,
        lease_s=options.lease_seconds,
        abandon_uploads_s=options.abandon_uploads_seconds,
        keep_days=options.keep_days,
        shutdown_grace_s=options.shutdown_grace_seconds,
        model_labels=options.model_labels,
        limits=Limits(
            queued_per_namespace=options.max_queued,
            blob_bytes=options.max_blob_bytes,
            graph_nodes=options.max_graph_nodes,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fxlib_service", description="The fxlib optimization service.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of the database and the blobs")
    add("--listen", type=_address, default="127.0.0.1:8470", help="HOST:PORT of the service; port 0: any free one")
    add("--metrics", type=_address, default="127.0.0.1:8471", help="HOST:PORT of the metrics")
    add("--database", default="", metavar="URL", help="a SQLAlchemy URL; default: SQLite in the data folder")
    add("--tls-cert", type=Path, help="PEM file of the certificate chain; serves both addresses over TLS")
    add("--tls-key", type=Path, help="PEM file of the certificate's key")
    add("--client-ca", type=Path, help="PEM file; only clients with a certificate signed by it are served")
    add("--insecure", action="store_true", help="serve without TLS where other machines reach it")
    add("--policy", type=Path, metavar="FILE", help="TOML file that tells whose a token or certificate is")
    add("--ready-file", type=Path, help="write the line that tells the addresses here, too")
    add("--lease-seconds", type=_positive, default=Config.lease_s, help="silence after which a worker has lost its job")
    add("--max-queued", type=_count, default=Limits.queued_per_namespace, help="queued jobs of one namespace")
    add("--max-blob-bytes", type=_count, default=Limits.blob_bytes, help="size of one blob")
    add("--max-graph-nodes", type=_count, default=Limits.graph_nodes, help="nodes of one graph")
    add("--abandon-uploads-seconds", type=_positive, default=Config.abandon_uploads_s, help="life of a stalled upload")
    add("--keep-days", type=_days, default=Config.keep_days, help="life of finished jobs and unused blobs; 0: for ever")
    add("--shutdown-grace-seconds", type=_positive, default=Config.shutdown_grace_s, help="life of calls after SIGTERM")
    add("--model-labels", type=_count, default=Config.model_labels, help="model names that the metrics tell apart")
    return parser


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
    return value


def _days(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is negative, or not finite")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value

from dataclasses import fields
from pathlib import Path

import pytest

from fxlib.errors import FxlibError
from fxlib_service.config import Address, Config, Tls
from fxlib_service.options import parse


def test_the_defaults_are_the_configuration_s() -> None:
    assert parse(["--data", "d"]) == Config(data=Path("d"))


def test_every_option_reaches_the_configuration() -> None:
    options = (
        "--data d --listen 10.0.0.1:1 --metrics [::1]:2 --database sqlite:///x --tls-cert c --tls-key k --client-ca a "
        "--insecure --policy p --ready-file r --lease-seconds 3 --max-queued 4 --max-blob-bytes 5 --max-graph-nodes 6 "
        "--abandon-uploads-seconds 7 --keep-days 10 --shutdown-grace-seconds 8 --model-labels 9"
    )
    config = parse(options.split())
    assert config.listen == Address(host="10.0.0.1", port=1)
    assert config.metrics == Address(host="::1", port=2)
    assert config.tls == Tls(certificate=Path("c"), key=Path("k"), client_ca=Path("a"))
    defaults = Config(data=Path("data"))
    assert all(getattr(config, each.name) != getattr(defaults, each.name) for each in fields(Config))
    limits = config.limits
    assert (limits.queued_per_namespace, limits.blob_bytes, limits.graph_nodes) == (4, 5, 6)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--listen", "0.0.0.0:0"], "reachable from other machines"),
        (["--tls-cert", "a.pem"], "go together"),
        (["--client-ca", "a.pem"], "needs --tls-cert and --tls-key"),
    ],
)
def test_options_that_are_not_safe_or_not_whole_are_refused(options: list[str], says: str) -> None:
    with pytest.raises(FxlibError, match=says):
        parse(["--data", "d", *options])


@pytest.mark.parametrize(
    "options",
    [
        ["--listen", "nonsense"],
        ["--lease-seconds", "nan"],
        ["--lease-seconds", "0"],
        ["--max-queued", "-1"],
        ["--keep-days", "-1"],
        ["--keep-days", "inf"],
        ["--max-blob-bytes", "many"],
        ["--lis", "127.0.0.1:0"],
    ],
)
def test_options_that_cannot_be_read_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--data", "d", *options])
    assert "usage:" in capsys.readouterr().err

from dataclasses import fields
from pathlib import Path

import pytest

from fxlib.errors import FxlibError
from fxlib_service.config import APPLICATION, Address, Config, Tls


def parse(arguments: list[str], environment: dict[str, str] | None = None) -> Config:
    return APPLICATION.read(arguments, environment or {})


def test_the_defaults_are_the_configuration_s() -> None:
    assert parse(["--data", "d"]) == Config(data=Path("d"))


def test_every_option_reaches_the_configuration() -> None:
    options = (
        "--data d --listen 10.0.0.1:1 --metrics [::1]:2 --database sqlite:///x --blobs e "
        "--tls-cert c --tls-key k --client-ca a --insecure --policy p --token-file t --ready-file r "
        "--lease-seconds 3 --max-queued 4 --max-blob-bytes 5 --max-graph-nodes 6 --abandon-uploads-seconds 7 "
        "--keep-days 10 --reserve-bytes 11 --shutdown-grace-seconds 8 --model-labels 9 --audit-log l --tcp-only "
        "--max-in-flight-bytes 100000000 --max-live-reports 12"
    )
    config = parse(options.split())
    assert config.listen == Address(host="10.0.0.1", port=1)
    assert config.metrics == Address(host="::1", port=2)
    assert config.tls == Tls(certificate=Path("c"), key=Path("k"), client_ca=Path("a"))
    defaults = Config(data=Path("data"))
    assert all(getattr(config, each.name) != getattr(defaults, each.name) for each in fields(Config))
    limits = config.limits
    assert (limits.queued_per_namespace, limits.blob_bytes, limits.graph_nodes) == (4, 5, 6)
    assert (limits.in_flight_bytes, limits.live_reports_per_minute) == (100_000_000, 12)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--listen", "0.0.0.0:0"], "reachable from other machines"),
        (["--tls-cert", "a.pem"], "--tls-cert: it needs --tls-key, too"),
        (["--client-ca", "a.pem"], "--client-ca: it needs --tls-cert and --tls-key, too"),
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


def test_variables_and_a_file_give_the_same_options(tmp_path: Path) -> None:
    file = tmp_path / "fxlib.toml"
    file.write_text('[serve]\nlisten = "127.0.0.1:1"\nmax-queued = 4\nkeep-days = 10\n')
    environment = {"FXLIB_CONFIG": str(file), "FXLIB_SERVE_KEEP_DAYS": "20", "FXLIB_SERVE_LISTEN": "127.0.0.1:2"}
    config = parse(["--listen", "127.0.0.1:3"], environment)
    assert (config.listen.port, config.keep_days, config.limits.queued_per_namespace) == (3, 20, 4)


def test_what_is_not_safe_is_told_where_it_was_said() -> None:
    with pytest.raises(FxlibError, match=r"^FXLIB_SERVE_LISTEN: 0.0.0.0:1 is reachable from other machines"):
        parse([], {"FXLIB_SERVE_LISTEN": "0.0.0.0:1"})


def test_without_a_folder_data_is_kept_in_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/shared")
    assert parse([]).data == Path("/shared/fxlib")


def test_without_a_home_the_data_folder_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert parse(["--data", "d"]).data == Path("d")
    with pytest.raises(FxlibError, match=r"--data: this user has no home .* Name a folder\."):
        parse([])

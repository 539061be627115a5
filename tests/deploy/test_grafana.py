"""What Grafana and Prometheus are provisioned with agrees with itself, and with the metrics that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service.support import make_service

DEPLOY = Path(__file__).parents[2] / "deploy"
PROVISIONING = DEPLOY / "grafana" / "provisioning"
DASHBOARDS = sorted(DEPLOY.glob("grafana/*.json"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
LABELS = {"fxlib_namespace"}


def provisioned(kind: str) -> list[Any]:
    """Return what the files of a kind provision."""
    (path,) = (PROVISIONING / kind).iterdir()
    told = yaml.safe_load(path.read_text())
    assert told.pop("apiVersion") == 1
    ((_, found),) = told.items()
    return list(found)


def mounts() -> dict[Path, Path]:
    """Return where Compose puts files of `deploy/` for Grafana."""
    pairs = (each.split(":") for each in COMPOSE["grafana"]["volumes"])
    return {DEPLOY / source: Path(target) for source, target, *_ in pairs}


def found(key: str, value: Any) -> Iterator[Any]:
    """Find what stands under a key, at any depth."""
    if isinstance(value, list):
        for each in value:
            yield from found(key, each)
    elif isinstance(value, dict):
        yield from [value[key]] if key in value else []
        for each in value.values():
            yield from found(key, each)


def test_grafana_finds_what_is_provisioned() -> None:
    assert mounts()[PROVISIONING] == Path("/etc/grafana/provisioning")
    (provider,) = provisioned("dashboards")
    assert provider["type"] == "file"
    assert {mounts()[path].parent for path in DASHBOARDS} == {Path(provider["options"]["path"])}


def test_variables_of_provisioning_are_as_grafana_reads_them_and_are_set() -> None:
    """Grafana knows ${NAME}, with no default, and $$ for a dollar."""
    for path in PROVISIONING.rglob("*.yml"):
        text = re.sub(r"(?m)#.*$", "", path.read_text()).replace("$$", "")
        used = re.findall(r"\$\{?([^}\s]*)", text)
        assert set(used) <= set(COMPOSE["grafana"]["environment"])


def test_the_data_source_is_the_prometheus_of_compose() -> None:
    (source,) = provisioned("datasources")
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    variable = source["url"].removeprefix("${").removesuffix("}")
    assert COMPOSE["grafana"]["environment"][variable] == "http://service:9090"
    assert COMPOSE["prometheus"]["network_mode"] == "service:service"


def test_an_exemplar_leads_to_the_dashboard_of_compose() -> None:
    (source,) = provisioned("datasources")
    (link,) = source["jsonData"]["exemplarTraceIdDestinations"]
    (port,) = COMPOSE["dashboard"]["ports"]
    assert link["name"] == "job_id"
    assert link["url"] == f"http://localhost:{port.split(':')[1]}/jobs/$${{__value.raw}}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_asks_a_source_that_is_provisioned_or_chosen(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    chosen = {f"${{{each['name']}}}" for each in dashboard["templating"]["list"] if each["type"] == "datasource"}
    known = chosen | {each["uid"] for each in provisioned("datasources")}
    assert {each["uid"] for each in found("datasource", dashboard)} <= known
    assert dashboard["uid"]


async def test_every_metric_that_is_asked_for_is_one_of_the_service_s() -> None:
    async with make_service() as core:
        families = list(core.registry.collect())
    known = {each.name + suffix for each in families for suffix in SUFFIXES.get(each.type, ())}
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    rules, tests = (yaml.safe_load((DEPLOY / each).read_text()) for each in ("alerts.yml", "alerts_test.yml"))
    asked = [*found("expr", dashboards), *found("definition", dashboards), *found("expr", rules)]
    asked += found("series", tests)
    assert len(asked) > 40
    used = {
        name for each in asked for name in re.findall(r"\b(?:fxlib|process|python)_\w+", re.sub(r'"[^"]*"', "", each))
    }
    assert used - LABELS - known == set()

"""The operators' guide says what there is."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from fxlib_service.blobs.memory import MemoryBlobStore
from fxlib_service.config import Config
from fxlib_service.core import make_core
from fxlib_service.options import _parser
from fxlib_service.status import STATUS
from fxlib_service.stores.memory import MemoryJobStore

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "service.md").read_text()


def test_it_lists_every_error_with_its_status() -> None:
    told = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \|", GUIDE, re.MULTILINE)
    assert told == [(code.name, status.name) for code, status in STATUS.items()]


def test_it_lists_every_option() -> None:
    options = {name for action in _parser()._actions for name in action.option_strings} - {
        "-h",
        "--help",
        "--ready-file",
    }
    assert options == set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"^\| `(--.*?)` \|", GUIDE, re.MULTILINE))))


async def test_it_lists_every_metric() -> None:
    core = await make_core(Config(data=Path("unused")), MemoryJobStore(), MemoryBlobStore())
    assert isinstance(core.registry, CollectorRegistry)
    names = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name
        for metric in core.registry.collect()
        if metric.name.startswith("fxlib_")
    }
    await core.close()
    table = GUIDE.partition("## Metrics")[2].partition("## Limits")[0]
    assert set(re.findall(r"`(fxlib_\w+)`", table)) == names

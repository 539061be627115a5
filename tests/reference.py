"""The pages of docs/reference/ that come from the code: `python -m tests.reference` writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fxlib import config
from fxlib.utils.settings import CONFIG, Application
from fxlib_service.config import APPLICATION as SERVICE
from fxlib_service.config import Config
from fxlib_service.core import make_core
from fxlib_workers.config import APPLICATION as WORKER
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.memory_job_store import MemoryJobStore

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

_NOTE = "<!-- Written by `make reference` from the code. -->"

_OPTIONS = f"""{_NOTE}

# Options

The service (`fxlib serve`, `python -m fxlib_service`) and a worker (`fxlib worker`, `python -m fxlib_workers`) take
each option in three ways, of which the first that says something decides:

1. the flag: `fxlib worker --slots 2`, and for a switch `--once` or `--no-once`;
2. the environment variable: `FXLIB_WORKER_SLOTS=2`; for a switch 1 or 0, for a repeatable option values with commas
   between; an empty variable says nothing;
3. the file that `--config FILE` or `{CONFIG}` names. It is TOML, with a table for the service and one for workers;
   a key is the flag without its dashes:

```toml
[serve]
listen = "0.0.0.0:8470"
tls-cert = "/etc/fxlib/service.pem"
tls-key = "/etc/fxlib/service.key"
keep-days = 7

[worker]
slots = 2
allow-module = ["clicks.servers", "ads.servers"]
```

Paths are relative to the folder in which the command is given. A value that cannot be used, or a key that there is
not, ends the command with exit code 2 and a sentence that names the flag, the variable or the file's key.
`--print-options` prints the options in force as JSON, with where each comes from.

`fxlib serve` takes the options of the service, and hands `--allow-module`, `--ray-address`, `--interface` and
`--tls-ca` to the worker that it starts beside it, which reads its variables and its table of the file, too.
`--no-worker` starts none.
"""

_METRICS = f"""{_NOTE}

# Metrics

The service tells these to Prometheus, at the path `/metrics` of its address `--metrics`. `deploy/prometheus.yml`
scrapes them, and `deploy/grafana/fxlib.json` shows them. Every label has a bounded set of values, whatever clients
send. Answers from the cache change no figure of a model.
"""


def options() -> str:
    """Return the page of options."""
    parts = [_OPTIONS]
    for title, application in (("The service", SERVICE), ("A worker", WORKER)):
        rows = _option_rows(application)
        parts.append(f"## {title}\n\n" + _table(["flag", "variable", "default", "meaning"], rows))
    else_at = f"where the service is, for launchers and commands that do not say (else `{config.DEFAULT_ADDRESS}`)"
    disabled = "anything but nothing or 0 has every launcher train with its original module, with no traffic at all"
    variables = [(f"`{config.SERVICE}`", else_at), (f"`{config.DISABLE}`", disabled)]
    parts.append("## A launcher\n\n" + _table(["variable", "meaning"], variables))
    return "\n".join(parts)


def _option_rows(application: Application[Any]) -> Iterator[tuple[str, ...]]:
    for option, variable, default in application.options():
        flag = f"--{option.name}" if option.kind is None else f"--{option.name} {option.kind.metavar}"
        repeated = "; repeatable" if option.repeatable else ""
        yield f"`{flag}`", f"`{variable}`", default, option.meaning + repeated


def metrics() -> str:
    """Return the page of metrics."""
    return f"{_METRICS}\n" + _table(["metric", "type", "labels", "meaning"], sorted(asyncio.run(_metric_rows())))


async def _metric_rows() -> list[tuple[str, ...]]:
    core = await make_core(Config(), MemoryJobStore(), MemoryBlobStore())
    rows: list[tuple[str, ...]] = []
    for collector in core.registry._collector_to_names:
        for family in collector.collect():
            if family.name.startswith("fxlib_"):
                # A counter or histogram knows its labels itself; what a collector makes anew each time tells them.
                labels: tuple[str, ...] = getattr(collector, "_labelnames", getattr(family, "_labelnames", ()))
                name = f"{family.name}_total" if family.type == "counter" else family.name
                rows.append((f"`{name}`", family.type, ", ".join(labels), family.documentation))
    await core.close()
    return rows


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |\n" for row in lines)


PAGES: dict[str, Callable[[], str]] = {"options.md": options, "metrics.md": metrics}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())

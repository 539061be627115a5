"""The pages of docs/reference/ that come from the code: `python -m tests.reference` writes them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from fxlib import config
from fxlib.utils.settings import CONFIG, Application
from fxlib_service.config import APPLICATION as SERVICE
from fxlib_service.config import Config
from fxlib_service.core import make_core
from fxlib_workers.config import APPLICATION as WORKER
from tests.service.memory_blob_store import MemoryBlobStore
from tests.service.memory_job_store import MemoryJobStore

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_PROTOS = Path(__file__).parents[1] / "protos"
_ORDER = ("jobs", "workers", "blobs", "workload", "profile", "graph")
"""The files of the protocol, in the order in which a reader meets them."""

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

_PROTOCOL = f"""{_NOTE}

# The protocol

These are the messages that launchers, the service and workers exchange over gRPC, as the files in `protos/fxlib/v1`
say. `fxlib/protocol` converts the messages to the dataclasses that the code uses, and `fxlib/wire` does so for graphs
([the wire format](wire.md)).

- The package is `fxlib.v1`. Fields are only ever added, and never change their number or meaning.
- A scalar that is not set has the default of proto3: zero, an empty text, false. A field is *optional* where being
  unset means something else than that.
- Times are in seconds and sizes in bytes, unless a field says otherwise.
- Errors are gRPC statuses with `google.rpc` details; [the service's page](../how-to/service.md#errors) lists them.
"""
_MESSAGE_FIELD, _ENUM_VALUE, _METHOD = 2, 2, 2
"""Numbers of the fields of descriptors that lead to comments."""
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 4, 5, 6

_Comments = dict[tuple[int, ...], str]


def options() -> str:
    """Return the page of options."""
    parts = [_OPTIONS]
    for title, application in (("The service", SERVICE), ("A worker", WORKER)):
        rows = _option_rows(application)
        parts.append(f"## {title}\n\n" + _table(["flag", "variable", "default", "meaning"], rows))
    else_at = f"where the service is, for launchers and commands that do not say (else `{config.DEFAULT_ADDRESS}`)"
    disabled = "anything but nothing or 0 has every launcher train with its original module, with no traffic at all"
    kept = (
        "folder in which a launcher keeps what OpenVINO and ONNX Runtime made of parts of a graph (else "
        "`~/.cache/fxlib/compiled`); nothing at all keeps nothing"
    )
    variables = [(f"`{config.SERVICE}`", else_at), (f"`{config.DISABLE}`", disabled), (f"`{config.CACHE}`", kept)]
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


def protocol() -> str:
    """Return the page of the protocol."""
    files = _files()
    names = sorted(files, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    return "\n".join([_PROTOCOL, *(part for name in names for part in _file_part(files[name]))])


def _files() -> dict[str, FileDescriptorProto]:
    """Return the .proto files by their names, with comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "all")
        sources = sorted(str(path) for path in _PROTOS.rglob("*.proto"))
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={_PROTOS}", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out}", *sources], check=True)
        found = FileDescriptorSet.FromString(out.read_bytes()).file
    return {Path(file.name).stem: file for file in found}


def _file_part(file: FileDescriptorProto) -> Iterator[str]:
    """Yield the parts of one file: services, messages, enums."""
    comments: _Comments = {
        tuple(place.path): " ".join(place.leading_comments.split()) for place in file.source_code_info.location
    }
    yield f"## {file.name}\n"
    for at, service in enumerate(file.service):
        yield from _heading(service.name, comments.get((_FILE_SERVICE, at), ""))
        rows = [
            (
                f"`{method.name}`",
                _streamed(method.input_type, stream=method.client_streaming),
                _streamed(method.output_type, stream=method.server_streaming),
                comments.get((_FILE_SERVICE, at, _METHOD, number), ""),
            )
            for number, method in enumerate(service.method)
        ]
        yield _table(("method", "request", "answer", ""), rows)
    for at, message in enumerate(file.message_type):
        if message.field:
            yield from _message_part(message, comments, (_FILE_MESSAGE, at))
    for at, enum in enumerate(file.enum_type):
        yield from _heading(enum.name, comments.get((_FILE_ENUM, at), ""))
        values = [
            (str(value.number), f"`{value.name}`", comments.get((_FILE_ENUM, at, _ENUM_VALUE, number), ""))
            for number, value in enumerate(enum.value)
        ]
        yield _table(("number", "value", ""), values)


def _message_part(message: DescriptorProto, comments: _Comments, path: tuple[int, ...]) -> Iterator[str]:
    """Yield a message's heading and its fields."""
    yield from _heading(message.name, comments.get(path, ""))
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = [
        (
            str(field.number),
            f"`{field.name}`",
            _type_of(field, message, entries),
            comments.get((*path, _MESSAGE_FIELD, at), ""),
        )
        for at, field in enumerate(message.field)
    ]
    yield _table(("number", "field", "type", ""), rows)


def _type_of(field: FieldDescriptorProto, message: DescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    """Return a field's type as a reader of .proto files knows it."""
    name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.type_name:
        name = field.type_name.rpartition(".")[2]
    if name in entries:
        key, value = (_type_of(each, message, {}) for each in entries[name].field)
        return f"map of {key} to {value}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _streamed(name: str, *, stream: bool) -> str:
    """Return the name of a request or an answer."""
    return ("stream of " if stream else "") + name.rpartition(".")[2]


def _heading(name: str, comment: str) -> Iterator[str]:
    """Yield the heading of a service, a message or an enum, and what its file says of it."""
    yield f"### {name}\n"
    if comment:
        yield comment + "\n"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |\n" for row in lines)


PAGES: dict[str, Callable[[], str]] = {"options.md": options, "metrics.md": metrics, "protocol.md": protocol}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())

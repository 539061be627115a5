"""The protocol as a page: `python protos/reference.py` writes docs/reference/protocol.md from the .proto files."""  # noqa: INP001 - a script

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

PROTOS = Path(__file__).parent
PAGE = PROTOS.parent / "docs" / "reference" / "protocol.md"
ORDER = ("jobs", "workers", "blobs", "workload", "profile", "graph")
"""The files, in the order in which a reader meets them."""
HEADER = """# The protocol

These are the messages that launchers, the service and workers exchange over gRPC. `make protos` writes this page from
the files in `protos/fxlib/v1`. `fxlib/protocol` converts the messages to the dataclasses that the code uses, and
`fxlib/wire` does so for graphs ([the wire format](wire.md)).

- The package is `fxlib.v1`. Fields are only ever added, and never change their number or meaning.
- A scalar that is not set has the default of proto3: zero, an empty text, false. A field is *optional* where being
  unset means something else than that.
- Times are in seconds and sizes in bytes, unless a field says otherwise.
- Errors are gRPC statuses with `google.rpc` details; [the service's page](../how-to/service.md#errors) lists them.
"""
MESSAGE_FIELD, ENUM_VALUE, METHOD = 2, 2, 2
"""Numbers of the fields of descriptors that lead to comments."""
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6

Comments = dict[tuple[int, ...], str]


def files() -> dict[str, FileDescriptorProto]:
    """Return the project's files by their names, with comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "all")
        sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
        command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out}", *sources], check=True)
        found = FileDescriptorSet.FromString(out.read_bytes()).file
    return {Path(file.name).stem: file for file in found}


def page() -> str:
    """Return the whole page."""
    found = files()
    names = sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    return "\n".join([HEADER, *(part for name in names for part in file_part(found[name]))])


def file_part(file: FileDescriptorProto) -> Iterator[str]:
    """Yield the parts of one file: services, messages, enums."""
    comments: Comments = {
        tuple(place.path): " ".join(place.leading_comments.split()) for place in file.source_code_info.location
    }
    yield f"## {file.name}\n"
    for at, service in enumerate(file.service):
        yield from heading(service.name, comments.get((FILE_SERVICE, at), ""))
        rows = [
            (
                f"`{method.name}`",
                streamed(method.input_type, stream=method.client_streaming),
                streamed(method.output_type, stream=method.server_streaming),
                comments.get((FILE_SERVICE, at, METHOD, number), ""),
            )
            for number, method in enumerate(service.method)
        ]
        yield table(("method", "request", "answer", ""), rows)
    for at, message in enumerate(file.message_type):
        if message.field:
            yield from message_part(message, comments, (FILE_MESSAGE, at))
    for at, enum in enumerate(file.enum_type):
        yield from heading(enum.name, comments.get((FILE_ENUM, at), ""))
        values = [
            (str(value.number), f"`{value.name}`", comments.get((FILE_ENUM, at, ENUM_VALUE, number), ""))
            for number, value in enumerate(enum.value)
        ]
        yield table(("number", "value", ""), values)


def message_part(message: DescriptorProto, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    """Yield a message's heading and its fields."""
    yield from heading(message.name, comments.get(path, ""))
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = [
        (
            str(field.number),
            f"`{field.name}`",
            type_of(field, message, entries),
            comments.get((*path, MESSAGE_FIELD, at), ""),
        )
        for at, field in enumerate(message.field)
    ]
    yield table(("number", "field", "type", ""), rows)


def type_of(field: FieldDescriptorProto, message: DescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    """Return a field's type as a reader of .proto files knows it."""
    name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.type_name:
        name = field.type_name.rpartition(".")[2]
    if name in entries:
        key, value = (type_of(each, message, {}) for each in entries[name].field)
        return f"map of {key} to {value}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return name


def streamed(name: str, *, stream: bool) -> str:
    """Return the name of a request or an answer."""
    return ("stream of " if stream else "") + name.rpartition(".")[2]


def heading(name: str, comment: str) -> Iterator[str]:
    """Yield the heading of a service, a message or an enum, and what its file says of it."""
    yield f"### {name}\n"
    if comment:
        yield comment + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(each.replace("|", "\\|") for each in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

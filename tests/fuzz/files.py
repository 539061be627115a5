"""Targets of fuzzing: files that others may have written, and command lines."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fxlib import protocol
from fxlib.cli import inspection as graph_arguments
from fxlib.cli import options as arguments
from fxlib.errors import FxlibError
from fxlib.inspection.device import FOLDER, load_device
from fxlib.profiling.file import MARK as PROFILE_MARK
from fxlib.profiling.file import load_profile
from fxlib.ps.state import ServerState
from fxlib.serialization.files import digest_of
from fxlib.spec.report import Estimate
from fxlib.spec.servers import Server, Table
from fxlib.utils.local_service import read_token
from fxlib.zoo import Row, Run, read_manifest
from fxlib.zoo.source_files import Dependencies
from fxlib_service import config as service_config
from fxlib_service.errors import ServiceError
from fxlib_service.policy import Policy
from fxlib_workers import config as worker_config
from tests.fuzz.documents import change_document
from tests.fuzz.messages import TEXTS
from tests.fuzz.target import Scratch, Target, drawn, folder, framed, of_file, with_frames, words_of_json
from tests.protocol import strategies as some


def _devices() -> list[bytes]:
    return [path.read_bytes() for path in FOLDER.glob("*.toml")]


def _policies() -> list[bytes]:
    digest = "ab" * 32
    return [
        f'share_results = true\n[principals.ads]\nrole = "client"\nnamespace = "ads"\ntokens_sha256 = ["{digest}"]\n'
        "[quota]\nqueued_jobs = 3\n[namespaces.ads]\ntrial_seconds = 1.5\n".encode(),
        b'[principals.op]\nrole = "operator"\ncertificates = ["dns:a.example.org", "uri:spiffe://a/b"]\n',
    ]


def _read_serve_settings(path: Path) -> None:
    service_config.APPLICATION.read(["--config", str(path)], {})


def _read_worker_settings(path: Path) -> None:
    worker_config.APPLICATION.read(["--config", str(path)], {})


def _tables(command: str, application: Any) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        names = [declared.name for declared, _, _ in application.options()]
        half = len(names) // 2
        return [
            f"[{command}]\n{''.join(f'{name} = {value}{chr(10)}' for name in chosen)}".encode()
            for value in ("1", "0.5", "true", '"127.0.0.1:1"', '["a", "b"]')
            for chosen in (names[:half], names[half:], names[:1])
        ] + [f"[{command}]\n{name} = {value}\n".encode() for name in names for value in ("2", '"/a"', "true")]

    return seeds


def _read_arguments(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")  # as Python reads a command line
    for read in _ARGUMENTS:
        try:
            read(text)
        except (FxlibError, ValueError, argparse.ArgumentTypeError):
            continue


def _options_of(application: Any) -> list[Callable[[str], object]]:
    return [declared.kind.read for declared, _, _ in application.options() if declared.kind is not None]


_ARGUMENTS: list[Callable[[str], object]] = [
    arguments.step,
    arguments.label,
    graph_arguments._input,
    service_config.Address.parse,
    *_options_of(service_config.APPLICATION),
    *_options_of(worker_config.APPLICATION),
]


def _silently(read: Callable[[Path], object]) -> Callable[[Path], object]:
    def reading(path: Path) -> object:
        with redirect_stderr(io.StringIO()):
            return read(path)

    return reading


def _words_of_toml() -> tuple[str, ...]:
    more = ("[", "]", "=", "[[a]]", "{a=1}", "inf", "nan", "0x1f", "1979-05-27T07:32:00Z", "a.b.c = 1\n")
    return (*TEXTS, *more)


_ZOO = """[defaults]
recipe = "training"
labels = {team = "ads"}
[[model]]
factory = "m:net"
name = "{net}-{threads}"
matrix = {net = ["a", "b"], threads = [1, 2], where = [{hardware = "x"}]}
[[model]]
file = "*.fxg"
workload = "m:step"
expect = "adopt"
[[model]]
entry_point = "n"
passes = ["dead_code", ["split_calls", {}]]
budget_s = 3.5
"""


def _manifests() -> Target:
    scratch = Scratch("zoo.toml", folder())

    def read(data: bytes) -> None:
        for entry in read_manifest(scratch.holding(data)).entries:
            assert len(entry.digest) == 64

    words = (*_words_of_toml(), "matrix", "where", "file", "factory", "args", '["a", "b"]', "**", "/", "..", "{net}")
    return Target(
        name="manifests",
        read=read,
        seeds=lambda: [_ZOO.encode(), *(f"[[model]]\n{each}".encode() for each in _ZOO.split("[[model]]\n")[1:])],
        words=lambda: words,
    )


def _rows() -> Target:
    """A row of a run, or, behind a line break, what the run says of itself."""
    run = Run(folder())
    (run.folder / "rows").mkdir()
    row, about = Scratch(f"{run.slug('a')}.json", run.folder / "rows"), Scratch("run.json", run.folder)
    full = Row(
        name="a",
        state="done",
        gain=Estimate(value=0.1, low=0.0, high=0.2),
        qps_original=3.5,
        dependencies=Dependencies(files={"/a": (1, 2)}, environment="x"),
    )

    def read(data: bytes) -> None:
        if data[:1] == b"\n":
            about.holding(data[1:])
            assert all(isinstance(each, str) for each in (*run.names, run.manifest))
            return
        row.holding(data)
        found = run.row("a")
        assert Row.of(json.loads(json.dumps(asdict(found)))) == found or "NaN" in json.dumps(asdict(found))
        json.dumps(found.to_dict())

    return Target(
        name="rows",
        read=read,
        seeds=lambda: [
            json.dumps({"form": 1, **asdict(full)}).encode(),
            json.dumps({"form": 1, **asdict(Row(name="a"))}).encode(),
            b"\n" + json.dumps({"form": 1, "manifest": "z", "entries": ["a"], "began": "x", "fresh": True}).encode(),
        ],
        change=change_document,
        words=words_of_json,
    )


def _tables_of_servers() -> Target:
    state = ServerState(Server(name="ps0", tables=(Table(name="t", rows=4, dim=2, optimizer="adagrad"),)), seed=0)
    scratch = Scratch("table.t.safetensors", folder())
    kept = {"0": torch.ones(4, 2), "1": torch.zeros(4, 2)}

    def read(data: bytes) -> None:
        before = state.digest()
        try:
            state.load(str(scratch.holding(framed(data)).parent))
        except FxlibError:
            assert state.digest() == before, "what is refused is taken over in part"
            raise

    return Target(
        name="table-files",
        read=read,
        seeds=lambda: with_frames([save(kept, {"server": "ps0"}), save({"0": torch.ones(4, 2)})]),
        words=words_of_json,
    )


_WORDS_OF_ARGUMENTS = (*TEXTS, "[" * 60, "x", ":", "=", ",", "int64", "0x", "99999999999", "e308", "inf", "nan")

FILES = (
    of_file(
        "profile-files",
        load_profile,
        lambda: [protocol.profile_to_proto(each).SerializeToString() for each in drawn(some.profiles)],
        sealed=lambda message: PROFILE_MARK + digest_of(message) + message,
    ),
    of_file("device-files", load_device, _devices, words=_words_of_toml),
    of_file("policy-files", Policy.read, _policies, words=_words_of_toml, refusals=(FxlibError, ServiceError)),
    of_file(
        "serve-settings",
        _silently(_read_serve_settings),
        _tables("serve", service_config.APPLICATION),
        words=_words_of_toml,
    ),
    of_file(
        "worker-settings",
        _silently(_read_worker_settings),
        _tables("worker", worker_config.APPLICATION),
        words=_words_of_toml,
    ),
    of_file("token-files", read_token, lambda: [b"secret-token\n", b"a" * 4097]),
    _manifests(),
    _rows(),
    _tables_of_servers(),
    Target(
        name="arguments",
        read=_read_arguments,
        seeds=lambda: [
            *(b"split_calls:nested=[1,2],a=b", b"2x3x224x224:int64", b"127.0.0.1:8470", b"[::1]:80", b"a=b"),
            *(b"1.5", b"12", b"host:port:1"),
        ],
        words=lambda: _WORDS_OF_ARGUMENTS,
    ),
)

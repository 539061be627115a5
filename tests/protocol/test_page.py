"""The page of the protocol is what the .proto files say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from fxlib.v1 import jobs_pb2

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "protos" / "reference.py"))


def test_the_page_is_written_anew_when_the_protocol_changes() -> None:
    assert SCRIPT["PAGE"].read_text() == SCRIPT["page"](), "run `make protos`"


def test_the_page_has_every_field_of_a_message_under_its_number() -> None:
    section = SCRIPT["page"]().partition("### JobResult\n")[2].partition("### ")[0]
    told = re.findall(r"^\| (\d+) \| `(\w+)` \|", section, re.MULTILINE)
    assert told == [(str(field.number), field.name) for field in jobs_pb2.JobResult.DESCRIPTOR.fields]

"""The pages of docs/reference/ that come from the code say what the code says."""

import re

import pytest

from fxlib.passes import REGISTRY
from fxlib.v1 import jobs_pb2
from tests.reference import FOLDER, PAGES


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_the_code_says(page: str) -> None:
    assert (FOLDER / page).read_text() == PAGES[page](), "run `make reference`"


def test_the_page_of_the_protocol_has_every_field_of_a_message_under_its_number() -> None:
    section = PAGES["protocol.md"]().partition("### JobResult\n")[2].partition("### ")[0]
    told = re.findall(r"^\| (\d+) \| `(\w+)` \|", section, re.MULTILINE)
    assert told == [(str(field.number), field.name) for field in jobs_pb2.JobResult.DESCRIPTOR.fields]


def test_the_page_of_passes_names_each_pass_of_the_library() -> None:
    told = set(re.findall(r"\w+", (FOLDER / "passes.md").read_text()))
    assert {name for name, each in REGISTRY.items() if each.__module__.startswith("fxlib.passes.")} <= told

"""The operators' guide says what there is."""

import re
from pathlib import Path

from fxlib_service.status import STATUS

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "service.md").read_text()


def test_it_lists_every_error_with_its_status() -> None:
    told = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \|", GUIDE, re.MULTILINE)
    assert told == [(code.name, status.name) for code, status in STATUS.items()]

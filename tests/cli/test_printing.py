"""What commands print as JSON is JSON."""

from __future__ import annotations

import json
import math

import pytest

from fxlib.cli.printing import say_json


def test_a_number_that_json_has_not_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"gain": {"value": 0.1, "low": -0.2, "high": math.inf}, "rest": [math.nan, (-math.inf, 1)]})

    def refuse(constant: str) -> float:
        raise ValueError(constant)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"gain": {"value": 0.1, "low": -0.2, "high": None}, "rest": [None, [None, 1]]}

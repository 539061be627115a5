"""What a host computes with: the processor time that its processes have taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxlib.utils import hardware


@pytest.mark.parametrize(
    "text, unit_s, seconds",
    [("usage_usec 2500000\nuser_usec 2000000\n", 1e-6, 2.5), ("1500000000\n", 1e-9, 1.5), ("", 1e-9, None)],
)
def test_the_processor_time_of_all_processes_is_what_the_kernel_counts(
    text: str, unit_s: float, seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "used").write_text(text)
    monkeypatch.setattr(hardware, "_USED", ((tmp_path / "absent", 1.0), (tmp_path / "used", unit_s)))
    found = hardware.used_s()
    assert found == (None if seconds is None else pytest.approx(seconds))

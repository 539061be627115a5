"""What a trial says of its own figures."""

from __future__ import annotations

from fxlib_workers.trial.run_trial import shared_cores_note


def test_it_is_told_from_a_tenth_on() -> None:
    assert shared_cores_note(0.05) == ()
    (note,) = shared_cores_note(0.31)
    assert "cores were shared: a trainer waited for one in 31% of the measured time" in note

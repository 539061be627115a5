"""What a trial says of its own figures."""

from __future__ import annotations

from fxlib_workers.trial.run_trial import note_of


def test_it_is_told_from_a_tenth_on() -> None:
    assert note_of(0.05) == ()
    (note,) = note_of(0.31)
    assert "cores were shared: a trainer waited for one in 31% of the measured time" in note

"""Compare two runs of a zoo, row by row: which rows became slower, fail now, or are no longer measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, Literal

from fxlib.spec.report import plain
from fxlib.zoo.pooling import logarithm
from fxlib.zoo.runs import Row

Kind = Literal["slower", "faster", "newly failing", "no longer measured", "measured again", "other", "new", "gone"]
"""A kind of change. The first, third and fourth are regressions."""

REGRESSIONS: Final[frozenset[Kind]] = frozenset(("slower", "newly failing", "no longer measured"))

ALPHA: Final = 0.05
"""Probability that a comparison of two equal runs finds a row slower, over all rows together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row that has changed.

    Attributes:
        name: the row's name.
        kind: the kind of change.
        before: the row in the earlier run; None if that has no such row.
        after: the row in the later run; None if that has no such row.
        p: the p-value of "not slower", after Holm's correction; None if no figures were compared.
    """

    name: str
    kind: Kind
    before: Row | None
    after: Row | None
    p: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the object as plain data."""
        rows = {"before": self.before, "after": self.after}
        plain_rows = {name: None if row is None else plain(row.to_dict()) for name, row in rows.items()}
        return {"name": self.name, "kind": self.kind, **plain_rows, "p": self.p}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The changes between two runs, and the number of rows with figures in both."""

    changes: tuple[Change, ...]
    compared: int

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The changes for the worse."""
        return tuple(each for each in self.changes if each.kind in REGRESSIONS)

    def to_dict(self) -> dict[str, Any]:
        """Return the object as plain data."""
        return {"compared": self.compared, "changes": [each.to_dict() for each in self.changes]}


def compare(before: Iterable[Row], after: Iterable[Row]) -> Comparison:
    """Compare two runs, row by row.

    A row is slower (or faster) if its interval lies below (above) that of the earlier run, and if its test still holds
    after Holm's correction for the number of rows that have figures in both runs. The test takes the logarithm of
    1 + gain as normal, with the standard error that follows from its interval. Rows with the answer of the same jobs
    have nothing to compare.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6,
    1979.
    """
    old, new = ({row.name: row for row in rows if row.over} for rows in (before, after))
    both = [(old[name], row) for name, row in new.items() if name in old]
    figures = [
        (one, two)
        for one, two in both
        if one.gain is not None and two.gain is not None and not two.job_ids == one.job_ids != ()
    ]
    slower = holm([_p_lower(one, two) for one, two in figures])
    faster = holm([_p_lower(two, one) for one, two in figures])
    changes = []
    for (one, two), p_slower, p_faster in zip(figures, slower, faster, strict=True):
        assert one.gain is not None  # noqa: S101 - only rows with figures were chosen above
        assert two.gain is not None  # noqa: S101
        if p_slower < ALPHA and two.gain.high < one.gain.low:
            changes.append(Change(name=two.name, kind="slower", before=one, after=two, p=p_slower))
        elif p_faster < ALPHA and two.gain.low > one.gain.high:
            changes.append(Change(name=two.name, kind="faster", before=one, after=two, p=p_faster))
    changed = {each.name for each in changes}
    changes += [
        Change(name=two.name, kind=kind, before=one, after=two)
        for one, two in both
        if two.name not in changed and (kind := _kind(one, two)) is not None
    ]
    changes += [Change(name=name, kind="new", before=None, after=row) for name, row in new.items() if name not in old]
    changes += [Change(name=name, kind="gone", before=row, after=None) for name, row in old.items() if name not in new]
    return Comparison(changes=tuple(changes), compared=len(figures))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values after Holm's correction, in the order of `values`."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda each: values[each])):
        largest = max(largest, min(1.0, values[index] * (len(values) - rank)))
        adjusted[index] = largest
    return adjusted


def _p_lower(one: Row, two: Row) -> float:
    """Return the p-value of "`two` is not below `one`", by the normal distribution of their difference."""
    assert one.gain is not None  # noqa: S101 - only rows with figures are compared
    assert two.gain is not None  # noqa: S101
    (mean_one, error_one), (mean_two, error_two) = (
        logarithm(one.gain, one.confidence),
        logarithm(two.gain, two.confidence),
    )
    error = math.hypot(error_one, error_two)
    if not error:
        return 0.0 if mean_two < mean_one else 1.0
    return NormalDist().cdf((mean_two - mean_one) / error)


def _kind(one: Row, two: Row) -> Kind | None:
    if two.state == "failed" and one.state != "failed":
        return "newly failing"
    if one.gain is not None and two.gain is None:
        return "no longer measured"
    if two.gain is not None and one.gain is None:
        return "measured again"
    return "other" if (one.outcome, one.reason, one.failure) != (two.outcome, two.reason, two.failure) else None

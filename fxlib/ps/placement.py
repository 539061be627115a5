"""Which server holds which table."""

from __future__ import annotations

from collections.abc import Sequence

from fxlib.spec.servers import Server, ServiceTimePer, Table


def place(
    tables: Sequence[Table],
    names: Sequence[str],
    *,
    service_time_s: float = 0.0,
    service_time_per: ServiceTimePer = "item",
) -> tuple[Server, ...]:
    """Spread tables over servers: the largest first, each to the server that holds the least (Graham's LPT rule, 1969).

    Args:
        tables: all tables of the job.
        names: of the servers, at least one.
        service_time_s: of each server.
        service_time_per: of each server: whether a call or each item of a batch takes this time.

    Raises:
        ValueError: there is no server.
    """
    if not names:
        raise ValueError("no server to place tables on")
    held: dict[str, list[Table]] = {name: [] for name in names}
    for table in sorted(tables, key=lambda table: -table.rows * table.dim):
        least = min(names, key=lambda name: sum(each.rows * each.dim for each in held[name]))
        held[least].append(table)
    return tuple(
        Server(
            name=name,
            tables=tuple(table for table in tables if table in held[name]),
            service_time_s=service_time_s,
            service_time_per=service_time_per,
        )
        for name in names
    )

# pyright: basic, reportMissingImports=false
"""Convert events to tables. pandas is in the extra ``frames``, pyarrow in the extra ``parquet``."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install
from staleflow.monitor.words import worker_name
from staleflow.trace.fold import Axis
from staleflow.trace.reader import FIELDS, Line


def columns(lines: Iterable[Line], kinds: Collection[str] = ()) -> dict[str, list[Any]]:
    """Return one list per column, all of equal length; None where an event lacks the field. ``kinds`` is a filter."""
    result: dict[str, list[Any]] = {}
    rows = 0
    axis = Axis()
    for line in lines:
        seconds = axis.see(line)
        if kinds and line.ev not in kinds:
            continue
        row = {"seq": line.seq, "inc": line.inc, "ev": line.ev, "seconds": seconds, "time": line.t}
        event = {} if line.event is None else msgspec.to_builtins(line.event)
        own = {key: value for key, value in event.items() if key in FIELDS[line.ev]}
        if "worker" in own:
            row["name"] = worker_name(own["worker"])
        row |= own
        for key, value in row.items():
            result.setdefault(key, [None] * rows).append(value)
        rows += 1
        for column in result.values():
            if len(column) < rows:
                column.append(None)
    return result


def frame(columns_by_name: Mapping[str, list[Any]]) -> Any:
    """Return a ``pandas.DataFrame`` with ``time`` as UTC timestamps. Raise ``ConfigError`` without pandas."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("to_frame", "pandas", f"it is not installed: {install('frames')}") from error
    table = pandas.DataFrame(columns_by_name)
    return table.assign(time=pandas.to_datetime(table["time"], unit="ns", utc=True)) if len(table) else table


def table(columns_by_name: Mapping[str, list[Any]]) -> Any:
    """Return a ``pyarrow.Table``; lists and structs keep their types. Raise ``ConfigError`` without pyarrow."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError("to_arrow", "pyarrow", f"it is not installed: {install('parquet')}") from error
    table: dict[str, Any] = dict(columns_by_name)
    if table:
        table["time"] = pyarrow.array(table["time"], pyarrow.timestamp("ns", tz="UTC"))
    return pyarrow.table(table)

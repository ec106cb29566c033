"""Render the stages of a configuration as text or as a mermaid diagram. No IO."""

from collections.abc import Iterator, Sequence

from staleflow.configs.rules.algorithm import filter_of
from staleflow.configs.schema import Config
from staleflow.configs.stages import Node, batch_of, concurrency_of, graph, groups_at_once, seconds_a_group, workers_of
from staleflow.protocols.wire.stages import REWARD, is_per_token, short_name

PUSH, TRAIN = "push", "train"


def waves(nodes: Sequence[Node]) -> list[list[Node]]:
    """Group the stages by their depth in the graph: all stages of a wave may start at the same time."""
    depth: dict[str, int] = {}
    for node in nodes:
        depth[node.name] = 1 + max((depth[stage] for stage in node.after), default=-1)
    return [[node for node in nodes if depth[node.name] == wave] for wave in range(max(depth.values()) + 1)]


def text(config: Config) -> str:
    """Return one line with the order of the stages, then one line per stage."""
    nodes = graph(config)
    order = [PUSH, *(" + ".join(node.name for node in wave) for wave in waves(nodes)), TRAIN]
    rows = [_row(config, node) for wave in waves(nodes) for node in wave]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    filter_note = "after the reward, zero_spread releases groups whose rewards are equal"
    return "\n".join((" → ".join(order), "", *lines, *(("", filter_note) if filter_of(config) != "none" else ())))


def _row(config: Config, node: Node) -> tuple[str, ...]:
    count, seconds = workers_of(config, node.name), seconds_a_group(config)[node.name]
    workers, concurrency = f"{count} worker{'s' if count > 1 else ''}", concurrency_of(config, node.name)
    side_by_side = f" ({groups_at_once(config, node.name, concurrency)} of an async def)" if concurrency else ""
    return (
        node.name,
        f"after {', '.join(node.after) or PUSH}",
        f"makes {', '.join(_columns(node.makes))}",
        f"{workers}, {batch_of(config, node.name)} groups at once{side_by_side}, at most {seconds:g} s each",
    )


def _columns(names: Sequence[str]) -> list[str]:
    return [short_name(name) + (" (a token)" if is_per_token(name) else "") for name in names]


def mermaid(config: Config) -> str:
    """Return a mermaid flowchart with one arrow per dependency, labelled with the columns that it carries."""
    return "\n".join(("flowchart LR", *(f"    {line}" for line in _arrows(graph(config)))))


def _arrows(nodes: Sequence[Node]) -> Iterator[str]:
    for node in nodes:
        if not node.after:
            yield f"{PUSH} --> {node.name}"
        for stage in node.after:
            columns = [short_name(name).partition("/")[2] for name in node.needs if name.split("/")[1] == stage]
            yield f'{stage} -- "{", ".join(columns)}" --> {node.name}'
    needed = {stage for node in nodes for stage in node.after}
    for node in nodes:
        if node.name not in needed:
            yield f"{node.name} --> {TRAIN}"
    yield f"{REWARD}{{{{{REWARD}}}}}"

"""The stages of a configuration as text and as a mermaid diagram. Pure."""

from collections.abc import Iterator, Sequence

from staleflow.configs.rules.algorithm import filter_of
from staleflow.configs.schema import Config
from staleflow.configs.stages import Node, batch_of, concurrency_of, graph, groups_at_once, seconds_a_group, workers_of
from staleflow.protocols.wire.stages import REWARD, is_per_token, short_name

PUSH, TRAIN = "push", "train"


def waves(nodes: Sequence[Node]) -> list[list[Node]]:
    """Stages that may work at the same time at the earliest, together."""
    depth: dict[str, int] = {}
    for node in nodes:
        depth[node.name] = 1 + max((depth[stage] for stage in node.after), default=-1)
    return [[node for node in nodes if depth[node.name] == wave] for wave in range(max(depth.values()) + 1)]


def text(config: Config) -> str:
    """One line for the order, then one a stage."""
    nodes = graph(config)
    order = [PUSH, *(" + ".join(node.name for node in wave) for wave in waves(nodes)), TRAIN]
    rows = [_row(config, node) for wave in waves(nodes) for node in wave]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    judged = "after the reward zero_spread releases groups of equal rewards"
    return "\n".join((" → ".join(order), "", *lines, *(("", judged) if filter_of(config) != "none" else ())))


def _row(config: Config, node: Node) -> tuple[str, ...]:
    count, seconds = workers_of(config, node.name), seconds_a_group(config)[node.name]
    workers, concurrency = f"{count} worker{'s' if count > 1 else ''}", concurrency_of(config, node.name)
    side_by_side = f" ({groups_at_once(config, node.name, concurrency)} of an async def)" if concurrency else ""
    return (
        node.name,
        f"after {', '.join(node.after) or PUSH}",
        f"makes {', '.join(_made(node.makes))}",
        f"{workers}, {batch_of(config, node.name)} groups at once{side_by_side}, at most {seconds:g} s each",
    )


def _made(names: Sequence[str]) -> list[str]:
    return [short_name(name) + (" (a token)" if is_per_token(name) else "") for name in names]


def mermaid(config: Config) -> str:
    """A flowchart: an arrow for each stage that another waits for, with the columns that flow along it."""
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

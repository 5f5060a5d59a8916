"""What every schedule needs, at a glance; ``pebbling`` proves more."""

from __future__ import annotations

from graphs.ir import Graph


def least_bytes(graph: Graph) -> int:
    """No valid schedule of this graph, in whatever order, has a smaller peak.

    Resident values are always there. While an op runs, so are its inputs, its outputs and its workspace; every op runs.
    At the end all graph outputs are there together.
    """
    size = [0 if v in graph.resident else value.size_bytes for v, value in enumerate(graph.values)]
    at_op = (op.workspace_bytes + sum(size[v] for v in (*op.inputs, *op.outputs)) for op in graph.ops)
    at_end = sum(size[v] for v in graph.outputs)
    return graph.resident_bytes + max(at_end, max(at_op, default=0))

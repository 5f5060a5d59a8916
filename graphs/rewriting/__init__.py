"""A traced graph of FX, from how the tracer leaves it to a Graph.

nodes      what FX nodes and operators are: their tensors, draws, effects
operators  how operators of our own are defined
rewrites   what makes a traced graph compute as eager execution does
unread     what operators of the backward do not read is not kept for them
settling   the rewrites in their order, and what is refused because a Graph has no words for it
sizes      how large the storages are that kernels make and allocators give out
numbering  storages become Values, and the calls that allocate become Ops
"""

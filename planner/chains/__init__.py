"""Graphs as chains of stages, as checkpointing and its dynamic programs see them.

chain        forward and backward pass, separators, which backward op belongs to which stage
checkpoints  the schedule that a set of checkpoints stands for
chain_dp     Rotor's dynamic program, with any number of ways to run a stage
blocks       such ways, solved exactly for a few budgets, once for blocks that are alike
block_chain  blocks and dynamic program together: a schedule of a whole graph
"""

"""Graphs as chains of stages, as checkpointing and its dynamic programs see them.

chain        forward and backward pass, separators, which backward op belongs to which stage
checkpoints  the schedule that a set of checkpoints stands for
chain_dp     Rotor's dynamic program, with any number of ways to run a stage
"""

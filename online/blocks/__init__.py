"""The parts of an eager block under a budget (``online.eager``).

block          what these parts ask of the block
interposition  operator calls of the program, and reads and writes past them
padding        what unpacking sequences of different lengths calls, in operators of its own
calls          what an operator call reads and writes, and whether it becomes an op of the engine
runs           the ops: each runs for the first time, and again when the engine asks for it
outside        tensors made outside of the block, parameters, gradients, states of optimizers
keeping        the engine's steps under the budget, and contents that stay in memory
storages       what the storages of the program hold
regions        memory that lies in several storages at once
record         what the block did, as a graph and a schedule of it

recipes        what a storage holds, and how the op that made it runs again
kinds          what is true of every call of an operator
estimates      what an op makes, and what it costs, without running it
workspace      what operators take for themselves while they run, learned by kind of call
tensors        the tensors in what a program holds
"""

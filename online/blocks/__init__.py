"""The parts of an eager block under a budget (``online.eager``).

recipes        what storages hold, and how the ops that made it run again
kinds          what is true of every call of an operator
estimates      what an op makes, and what it costs, without running it
workspace      what operators take for themselves while they run, learned by kind of call
tensors        the tensors in what a program holds
interposition  operator calls of the program, and reads and writes past them
"""

"""Searches for cheap schedules, without a proof of anything. Most are compiled by numba.

list_walk        make a sequence of ops fit a budget, greedily
walk_search      local search over list walks, for training steps
second_passes    sequences that they begin from where gradients do not fit beside the backward pass
annealing        simulated annealing on sequences of ops, whose order is free (``annealing_moves`` has its moves)
annealed_walks   both by turns, for graphs without a backward pass
halving          Twremat's: a tree decomposition halves the graph again and again
"""

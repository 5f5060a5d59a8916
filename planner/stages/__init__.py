"""The parts of cutting stages, the exact method (``planner.methods.cutting_stages``).

model            the MILP of a few events, and the way from its solution to a sequence of ops
spans            rows for several stages in a row, without which its relaxation is weak
events           which events a solution overlooks
solving          a round: the model relaxed or whole, while schedules are searched for beside the solver
climbing         relaxations in a row, beside whatever looks for schedules, while the bound is far away
branching        branch and bound on relaxations, where a few large values decide
search           what is known so far: incumbent, bound, list walks
first_schedules  where the first schedules come from
mending          annealing of the best schedule, and of solutions that hold too much
blocks           ways to run a block of a chain, solved by the model for a few budgets, once for blocks that are alike
block_chain      the schedule of a whole graph from such blocks
coarsening       a coarser graph, whose schedules are easier to find
order_search     other orders of first executions
passes           schedules in several passes, each of which makes gradients of its own
any_order        a bound on schedules in any order
exhaustive       A* over what is in memory, for small graphs; exhaustive_states: its compiled part
"""

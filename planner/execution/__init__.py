"""How a schedule becomes a training step of PyTorch. ``planner.execute`` has the modules that users meet.

lowering     from a schedule to straight-line FX code (``calls``: quicker ways to call an operator; ``statistics``: those of
             batch norms)
halves       the code of a module's call, and that of its backward
draws        random ops that run again repeat their draws
undo         what a failed call or backward has changed is taken back
replan       plans for inputs of other shapes
cuda_graph   the step captured once and replayed (``graph_draws``: its draws)
"""

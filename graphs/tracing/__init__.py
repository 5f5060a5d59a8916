"""From a model, its loss and its inputs to one traced graph, and back from the graph to the tensors of a call.

inputs     the forms of inputs, and which of them go to the loss
body       model and loss as they are traced
memoryless a model on the meta device as if it were on the CPU
trace      the trace itself, in several attempts
constants  what a model may branch on, since it depends on no input
answers    what a model is told that asks its data, and the check that a run would be told the same
targets    targets of a CTC loss that a mask chooses: they stay padded
checks     whether code that asks is a check, and with which answer it passes
refusals   what to say where a trace fails
binding    which tensors the placeholders of a captured step stand for
"""

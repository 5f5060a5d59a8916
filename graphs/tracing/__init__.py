"""From a model, its loss and its inputs to one traced graph, and back from the graph to the tensors of a call.

inputs     the forms of inputs, and which of them go to the loss
body       model and loss as they are traced
trace      the trace itself, in up to three attempts
constants  what a model may branch on, since it depends on no input
refusals   what to say where a trace fails
binding    which tensors the placeholders of a captured step stand for
"""

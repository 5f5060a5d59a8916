"""Every private torch name the project uses, behind names of our own: what may change between releases changes here.

names        classes, functions and constants that are used as they are
tensors      tensors and their storages: identity, memory, content, what they stand for
stand_ins    fake tensors, and the calls a trace makes on them
kernels      which kernels and which derivatives an operator has
running      what runs in this thread, and what is to be done around it
compiling    who asks whether it is being compiled, and who is told so
joint        forward, loss and backward traced as one graph
partitioned  what torch.compile hands to a backend, compiled in two parts
patching     other attributes of classes and modules for a while
"""

"""What a traced forward does beside calling operators, so that a step that would not do it again is refused.

watch        attributes it reads and changes
calls        the operator calls of a forward, to be compared with those of another one
generators   nothing is drawn in a trace, and no generator may be seeded
unseen       what changes a step's numbers and is no operator call
leaks        tensors of a trace that a forward has put where the model would find them later
leftovers    tensors that a step leaves beside its loss, and a planned step does not make
outside      where such tensors lie outside of the model's attributes
fingerprint  what a captured step took from its model beside tensors, so that a later edit is noticed
surroundings what functions of a step take from outside of modules, likewise
"""

"""What computes, evicts and rebuilds, whatever the rule, the allocator and the program.

engine             the DTR engine, for a program that is known
growing            the same where ops are declared as they come
victims            what to evict next: one storage, or all of a range of addresses
compiled_searches  searches of a pool and walks through its relations, compiled by numba
"""

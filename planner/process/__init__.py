"""What a long computation in Python needs of its process.

loading   imports that Ctrl-C cannot break
waiting   threads, and waits for them, that let Ctrl-C through as what it is
turns     who runs Python when two threads want to
pauses    fewer pauses by the garbage collector
clock     what time limits go by: it stands still while code is compiled
compiled  numba with types, and with a cache on disk that may fail (``flat``: a graph as arrays for it)
"""

"""Mathematical programs, and the solvers that minimise them within limits and interrupts.

milp            a program, minimised by HiGHS, and its relaxation by GLOP, both inside of OR-Tools
pseudo_boolean  the same over zeros and ones, by CP-SAT
cp_sat          CP-SAT itself, for constraint programs
mip_solvers     the same by any other solver: CBC and others through PuLP, SCIP
"""

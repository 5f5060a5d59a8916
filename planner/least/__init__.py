"""How few bytes will do: what is proved, and schedules that attain it or come close.

pebbling   the smallest peak of any schedule in any order, from below and from above (``pebbling_sets`` has its compiled code)
last_runs  what is needed while the last of some ops runs, in any order
cuts       the fewest bytes that lie between ops and other values
smallest   the smallest peak of any schedule in hand
"""

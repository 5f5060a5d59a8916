"""How few bytes will do: what is proved, and schedules that attain it or come close.

pebbling  the smallest peak of any schedule in any order, from below and from above (``pebbling_sets`` has its compiled code)
smallest  the smallest peak of any schedule in hand
"""

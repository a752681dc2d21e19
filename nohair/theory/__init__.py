"""The mathematics, in NumPy and SciPy alone.

`symmetric`: the weight of chains of relays; `bound`: the theorem's recursion and its majorant.
"""

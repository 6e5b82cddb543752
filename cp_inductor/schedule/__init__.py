"""Choose the order of a program's instructions from their times, bytes and dependencies.

This room knows neither graphs nor plans: a program is plain data.
"""

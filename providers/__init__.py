"""Execution providers: one file each, the registry that finds them, and what is known about them on this machine.

A provider's file holds its identity, probe, session options, claims and limits, and default cost profile, in the order
that `base` defines. `engine` opens the sessions; `availability`, `asking` and `claims` answer what works here.
"""

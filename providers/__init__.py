"""Execution providers: one file each, the registry that finds them, and what is known about them on this machine.

`base` defines what a provider is, `engine` opens sessions; `registry`, `asking` and `claims` answer what works here.
"""

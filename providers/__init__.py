"""Execution providers: one file each, the registry that finds them, and their state on this machine.

`base` defines a provider, `engine` opens sessions; `registry`, `asking` and `claims` know the devices that work here.
"""

"""The class of the builders of all ops, of which `Graph` is a subclass; op families add theirs when they are imported.

`builders.pyi` has their types. `scripts/builder_stubs.py` writes it.
"""


class Builders:
    """Methods that add a node each and return its value."""

    __slots__ = ()

"""Runs the command as `python -m rlx_ort.cli`; `python -m rlx_ort` does the same."""

import rlx_ort.__main__  # noqa: F401  # runs it

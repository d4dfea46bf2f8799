"""Runs the command as `python -m rlx_ort`, for environments whose scripts are not on the path."""

from rlx_ort.cli import main

main(prog_name="rlx-ort")

"""Runs a graph on one device: weights, checks of inputs, sessions and their placement.

The choice of the device is the task of `rlx_ort.selection`.
"""

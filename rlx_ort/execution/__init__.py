"""Run a graph on one device: weights, checks of what is fed, open sessions, and where their nodes are.

Nothing here knows why a device was chosen; that is `rlx_ort.selection`.
"""

"""Graphs made from a seed, run in every way on a device and compared with the float64 reference."""

"""The compile cache: models as ONNX Runtime optimised them and providers compiled them, kept between processes.

`store` finds, makes and evicts entries, `models` opens sessions through it, `starts` opens warmed packages.
"""

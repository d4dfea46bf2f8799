"""The compile cache: models as ONNX Runtime optimised them and providers compiled them, kept between processes.

`key` lists what an entry depends on, `entry` describes its folder, `store` finds, makes and evicts entries, `models`
opens sessions through it, `starts` opens the model of a warmed package. The store does not depend on ONNX Runtime.
"""

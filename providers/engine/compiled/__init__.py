"""The compile cache: models as ONNX Runtime optimised them, and what providers compiled, kept between processes.

`key` says what an entry depends on, `entry` what one folder holds, `store` finds, makes and evicts entries, and
`models` puts them before a session. The store knows nothing of ONNX Runtime.
"""

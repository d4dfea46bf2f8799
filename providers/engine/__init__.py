"""ONNX Runtime behind one door: its import, its sessions, the weights and buffers they borrow, the compiled models.

`runtime` imports it, `opening` and `saved` open sessions, `session` runs them. Providers decide what a session needs
by a `recipe.SessionRecipe`; nothing here names one of them.
"""

"""The one place that uses ONNX Runtime: its import, sessions, borrowed weights, bound buffers and compiled models.

`runtime` imports it, `opening` opens sessions and `session` runs them; those of compiled models are in `compiled`. A
provider decides how a session is opened by a `recipe.SessionRecipe`.
"""

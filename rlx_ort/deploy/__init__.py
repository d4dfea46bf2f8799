"""Model packages: a model, its weights, the policy it runs under and its expected outputs, checked before it runs.

`docs/package-format.md` describes the format. The front doors are `open.open_package` and `create.create_package`.
"""

"""The subcommands of `rlx-ort package`: one file each, imported when it is first needed."""

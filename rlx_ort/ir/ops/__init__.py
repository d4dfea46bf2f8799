"""The ops, one file a family: frozen dataclasses that infer their result types and costs, and their builders."""

"""The kernel set of a provider: what an exported model is written for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlx_ort.converters.to_onnx.dispatch import KernelSet, has_choice
from rlx_ort.ir.graph import Graph
from rlx_ort.providers.base import KernelClaim, Provider
from rlx_ort.providers.claims import takes

__all__ = ["kernel_set"]


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """A list of claims told apart by identity, as hashing one takes a while; holding it keeps its id from reuse."""

    claims: Sequence[KernelClaim]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _List) and self.claims is other.claims

    def __hash__(self) -> int:
        return id(self.claims)


def kernel_set(provider: Provider, graph: Graph) -> KernelSet | None:
    """Return the kernels that the model of a graph may count on; None when they cannot be listed, or make no odds."""
    claims = provider.claims() if has_choice(graph) else None
    if claims is None:
        return None
    trusted = functools.partial(_trusted, provider.distrusted_kernels, claims)
    return KernelSet(provider.ep_name or provider.name, _List(claims), trusted)


def _trusted(
    distrusted: frozenset[tuple[str, str]], claims: Sequence[KernelClaim], domain: str, op_type: str, *form: Any
) -> bool:
    return (domain, op_type) not in distrusted and takes(claims, domain, op_type, *form)

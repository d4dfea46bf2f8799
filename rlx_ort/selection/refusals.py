"""Devices that refused a graph when its session was opened, so that no choice makes the same mistake twice.

A refusal counts for the graph and the options it was compiled with. It is forgotten when the graph or the registered
providers change, or by `forget`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlx_ort.device import Device
from rlx_ort.errors import is_device_failure
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers import registry

__all__ = ["forget", "refusals", "remembered"]


@dataclass(frozen=True)
class _Refusal:
    state: tuple[object, ...]
    device: Device
    options: CompileOptions
    reason: str


_known: weakref.WeakKeyDictionary[Graph, list[_Refusal]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def remembered(graph: Graph, device: Device, options: CompileOptions) -> Iterator[None]:
    """Remember an error of the block as the device's refusal, unless every device would fail so; success forgets it."""
    try:
        yield
    except Exception as err:
        if is_device_failure(err):
            _replace(graph, device, options, [_Refusal(_state(graph), device, options, str(err) or type(err).__name__)])
        raise
    if _known.get(graph):
        _replace(graph, device, options, [])


def refusals(graph: Graph, options: CompileOptions) -> dict[Device, str]:
    """Return each device that refused the graph under these options, with the reason.

    What refuses although the CPU may help also refuses under the strict rule.
    """
    if not _known.get(graph):
        return {}
    state = _state(graph)
    with _lock:
        found = [refusal for refusal in _known.get(graph, ()) if refusal.state == state]
    helped = options.with_(placement=PlacementRule.ASSISTED)
    return {refusal.device: refusal.reason for refusal in found if refusal.options in (options, helped)}


def forget(graph: Graph) -> None:
    """Forget every refusal of a graph, so that its devices are tried again."""
    with _lock:
        _known.pop(graph, None)


def _replace(graph: Graph, device: Device, options: CompileOptions, found: list[_Refusal]) -> None:
    with _lock:
        others = [known for known in _known.get(graph, ()) if (known.device, known.options) != (device, options)]
        _known[graph] = others + found


def _state(graph: Graph) -> tuple[object, ...]:
    providers = registry.default_registry()
    return providers, providers.generation, graph.revision

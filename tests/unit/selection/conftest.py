"""Providers that exist only here: what they claim, cost and answer is written in each test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from rlx_ort import Device, DeviceError, DType, Graph, device, environment
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.providers import claims as kernel_claims
from rlx_ort.providers import registry
from rlx_ort.providers.base import (
    Availability,
    CostProfile,
    EngineSession,
    KernelClaim,
    Provider,
    SessionRequest,
)
from rlx_ort.selection import support

WORKS = Availability(available=True, hardware="Fake 1", driver="1.2")
AWAY = Availability(available=False, reason="libfake.so is missing", remedy="install libfake")


class FakeProvider(Provider):
    """A provider whose answers are given; it counts the questions and opens nothing."""

    answer: Availability = WORKS
    kernels: Sequence[KernelClaim] | None = ()
    profile: CostProfile | None = None
    probes: int

    def __init__(self) -> None:
        self.probes = 0
        self.claims_asked = 0

    def probe(self, device: Device) -> Availability:
        """Return the given answer."""
        self.probes += 1
        return self.answer

    def open(self, request: SessionRequest) -> EngineSession:
        """Fail the test, since selection opens no session, but for the values of constants, which it can do without."""
        if request.model.input_types or request.weights or request.model.nodes:
            raise AssertionError("selection opened a session")
        raise DeviceError("the devices here compute nothing")

    def default_profile(self, device: Device) -> CostProfile | None:
        """Return the given profile."""
        return self.profile

    def claims(self) -> Sequence[KernelClaim] | None:
        """Return the given kernels."""
        self.claims_asked += 1
        return self.kernels


class Machine:
    """The machine a test runs on: it has the providers that were added, and nothing else."""

    away = AWAY

    def __init__(self, providers: registry.ProviderRegistry) -> None:
        self.providers = providers

    def add(self, *kinds: str, **given: Any) -> FakeProvider:
        """Add a provider for some kinds; `given` replaces what `FakeProvider` answers."""
        name = given.pop("name", kinds[0])
        fake = type("Fake", (FakeProvider,), {"name": name, "kinds": kinds, "ep_name": f"{name}EP"} | given)
        provider: FakeProvider = fake()
        self.providers.register(provider)
        return provider

    @staticmethod
    def kernels(*op_types: str, dtypes: frozenset[DType] = frozenset({DType.F32})) -> tuple[KernelClaim, ...]:
        """Return one kernel for each operator of ai.onnx, for all versions and the given types of T."""
        return tuple(KernelClaim("", op_type, 1, 100, {"T": dtypes}) for op_type in op_types)

    @staticmethod
    def profile(**changes: Any) -> CostProfile:
        """Return a profile in round figures: 1 GFLOP/s, 1 byte per ns, and nothing for launches and transfers."""
        figures: dict[str, Any] = {
            "gemm_gflops": 1.0,
            "conv_gflops": 1.0,
            "memory_bytes_per_ns": 1.0,
            "dispatch_ns": 0.0,
            "roundtrip_ns": 0.0,
            "upload_bytes_per_ns": 0.0,
            "readback_bytes_per_ns": 0.0,
        }
        return CostProfile(**(figures | changes))

    @staticmethod
    def chain(*op_types: str, dtype: DType = DType.F32, shape: Sequence[int | str] = (2, 3)) -> Graph:
        """Return a graph that applies operators of one input one after the other."""
        graph = Graph("chain")
        value = graph.input("x", shape, dtype)
        for op_type in op_types:
            (value,) = graph.onnx_node(op_type, [value], types=[TensorType(dtype, Shape(shape))])
        graph.outputs = [value]
        return graph


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Nothing of the real machine reaches a test: no provider, no variable, no ONNX Runtime, no memory of others."""
    empty = registry.ProviderRegistry()
    monkeypatch.setattr(registry, "default_registry", lambda: empty)
    monkeypatch.setattr(kernel_claims, "_schemas", _onnx_schemas)
    monkeypatch.setattr(device, "_kinds", dict(device._kinds))
    monkeypatch.setattr(device, "_spellings", dict(device._spellings))
    for name in environment.VARIABLES:
        if name != "RLX_CACHE_DIR":  # the folder of this run of the tests
            monkeypatch.delenv(name, raising=False)
    environment.clear_overrides()
    kernel_claims.schema_version.cache_clear()
    support._supports.clear()
    yield Machine(empty)
    kernel_claims.schema_version.cache_clear()
    support._supports.clear()


def _onnx_schemas() -> dict[tuple[str, str], dict[int, Any]]:
    """Return ONNX's own schemas in the form ONNX Runtime gives them, so that these tests need no ONNX Runtime."""
    return _SCHEMAS


def _formals(values: Sequence[Any]) -> list[SimpleNamespace]:
    return [SimpleNamespace(name=value.name, typeStr=value.type_str) for value in values]


_SCHEMAS: dict[tuple[str, str], dict[int, Any]] = {}
for _schema in onnx.defs.get_all_schemas_with_history():
    _SCHEMAS.setdefault((_schema.domain, _schema.name), {})[_schema.since_version] = SimpleNamespace(
        inputs=_formals(_schema.inputs), outputs=_formals(_schema.outputs)
    )

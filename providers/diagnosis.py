"""Problems of this machine's ONNX Runtime, each with the command that repairs it, for `rlx-ort doctor`."""

from __future__ import annotations

import enum
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlx_ort.device import Device
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.runtime import Problem, reinstall_command, runtime_packages
from rlx_ort.providers.hardware import CoreShare, core_share, host_memory_bytes, memory_bytes
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.plugins import Plugin, find_plugins, plugin_devices, register_plugin
from rlx_ort.providers.registry import ProviderRegistry, default_registry
from rlx_ort.storage import cache_root

_CODES = {
    "runtime-broken": {"not installed": "runtime-absent", "too old": "runtime-too-old"},
    "plugin-broken": {"needs a newer ONNX Runtime": "plugin-newer", "is too old for ONNX Runtime": "plugin-older"},
}
"""Code of an error -> words in its reason that make it a more specific one."""


class Severity(enum.Enum):
    """How much a finding matters."""

    ERROR = "error"  # something does not work until it is repaired
    WARNING = "warning"  # something works worse, or elsewhere, than expected
    INFO = "info"  # nothing to repair


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of `rlx-ort doctor`; `code` is a stable name for scripts, such as `two-runtimes`."""

    code: str
    severity: Severity
    what: str
    remedy: str = ""


def diagnose(registry: ProviderRegistry | None = None) -> list[Finding]:
    """Return the findings, errors first. Imports ONNX Runtime and loads plugin libraries, but opens no session."""
    findings = _packages(runtime_packages())
    problem = runtime.runtime_problem()
    if problem is not None:
        findings.append(_error(problem, "runtime-broken"))
    else:
        findings += [Finding("runtime", Severity.INFO, f"{runtime.describe_runtime()} is loaded")]
        findings += _plugins(find_plugins(), registry or default_registry())
        findings += _providers(registry or default_registry())
    findings.append(_telemetry(os.environ))
    findings += [*_cores(core_share()), _memory(host_memory_bytes(), memory_bytes()), _kept(cache_root())]
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _packages(packages: Mapping[str, str]) -> list[Finding]:
    if len(packages) < 2:
        return []
    listed = " and ".join(f"{name} {version}" for name, version in packages.items())
    what = f"{listed} are installed into the same folder; the files are those of whichever came last"
    return [Finding("two-runtimes", Severity.ERROR, what, reinstall_command(dict(packages)))]


def _error(problem: Problem, default: str) -> Finding:
    code = next((code for words, code in _CODES[default].items() if words in problem.reason), default)
    return Finding(code, Severity.ERROR, problem.reason, problem.remedy)


def _plugins(plugins: tuple[Plugin, ...], registry: ProviderRegistry) -> list[Finding]:
    findings = []
    served = {provider.ep_name: provider for provider in registry.providers() if isinstance(provider, OrtProvider)}
    for plugin in plugins:
        engine = runtime.onnxruntime()
        problem = register_plugin(plugin, engine, runtime.engine_exceptions())
        if problem is not None:
            findings.append(_error(problem, "plugin-broken"))
            continue
        what = f"{plugin.distribution} {plugin.version} is registered ({', '.join(plugin.ep_names)})"
        known = [served[name] for name in plugin.ep_names if name in served]
        if known and not any(plugin_devices(engine, provider.ep_name) for provider in known):
            what += " and rejects all hardware of this machine"
            findings.append(Finding("no-hardware", Severity.WARNING, what, known[0].no_hardware_remedy()))
        else:
            findings.append(
                Finding("plugin", Severity.INFO, what if known else f"{what}; rlx_ort has no device for it")
            )
    return findings


def _providers(registry: ProviderRegistry) -> list[Finding]:
    """Find why listed providers do not load; those not installed are no finding."""
    listed = set(runtime.available_eps())
    findings = []
    for provider in registry.providers():
        if isinstance(provider, OrtProvider) and provider.ep_name in listed:
            problem = provider.missing(Device(provider.kinds[0]))
            if problem is not None:
                code = "vulkan" if "ulkan" in problem.reason else "provider-not-loadable"
                what = f"{provider.ep_name} is listed but cannot work: {problem.reason}"
                findings.append(Finding(code, Severity.ERROR, what, problem.remedy))
    return findings


def _telemetry(environ: Mapping[str, str]) -> Finding:
    off = environ.get("ORT_DISABLE_TELEMETRY", "") not in ("", "0")
    if off:
        return Finding("telemetry", Severity.INFO, "ONNX Runtime's telemetry is off (ORT_DISABLE_TELEMETRY)")
    if runtime.telemetry_allowed():
        return Finding("telemetry", Severity.INFO, "ONNX Runtime's telemetry is on, as RLX_ALLOW_ORT_TELEMETRY asks")
    what = "ONNX Runtime's telemetry may be on: ORT_DISABLE_TELEMETRY is unset or 0"
    return Finding("telemetry", Severity.WARNING, what, "set ORT_DISABLE_TELEMETRY=1 before Python starts")


def _cores(share: CoreShare) -> list[Finding]:
    used = f"sessions use {share.threads} of {share.host_physical} cores ({share.host_logical} hardware threads)"
    reasons = []
    if share.quota is not None and share.quota < share.host_physical:
        reasons.append(f"the control group pays for {share.quota:g}")
    if share.affinity < share.host_logical:
        reasons.append(f"the process may run on {share.affinity} hardware threads")
    if not reasons:
        return [Finding("cores", Severity.INFO, used)]
    what = f"{used}: {' and '.join(reasons)}"
    remedy = "raise the container's CPU limit, or leave it: ONNX Runtime alone would start too many threads"
    return [Finding("cores-limited", Severity.WARNING, what, remedy)]


def _memory(host: int, allowed: int) -> Finding:
    if allowed >= host:
        return Finding("memory", Severity.INFO, f"{host / 2**30:.3g} GiB of memory")
    what = f"the control group allows {allowed / 2**30:.3g} GiB of the machine's {host / 2**30:.3g} GiB of memory"
    remedy = "raise the container's memory limit if models do not fit: the system ends a process that exceeds it"
    return Finding("memory-limited", Severity.WARNING, what, remedy)


def _kept(folder: Path) -> Finding:
    """Return whether calibrations and compiled models can be kept; the folder is created if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding("cache", Severity.INFO, f"calibrations and compiled models are kept in {folder}")
    except OSError as err:
        what = f"{folder} cannot be written, so calibrations and compiled models are not kept: {err.strerror or err}"
        remedy = "make it writable, or set RLX_CACHE_DIR to a folder that is"
        return Finding("cache-unwritable", Severity.WARNING, what, remedy)

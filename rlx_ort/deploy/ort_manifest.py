"""The part of a package that ONNX Runtime itself reads: `manifest.json` and one ONNX model a variant.

Schema 1.0 of ONNX Runtime 1.31 (its `model_package/README.md`): unknown keys are refused there, so everything of ours
is in `rlx.json`. A shared asset is a folder named by the SHA-256 of a list of its files' digests and names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from rlx_ort.deploy.index import dump, parse
from rlx_ort.deploy.names import MANIFEST
from rlx_ort.errors import IntegrityError, PackageError

if TYPE_CHECKING:
    from rlx_ort.device import Device

COMPONENT = "model"
"""The name of the one component."""
MODEL_FILE = "model.onnx"
DATA_FILE = "weights.bin"
_PRODUCER = {"producer": "rlx_ort"}
_ASSETS = "shared_assets/"
_FOLDER_KEY = "session.model_external_initializers_file_folder_path"


def asset_uri(digest: str) -> str:
    """Return the name of the shared asset whose one file is `weights.bin` with this SHA-256."""
    listing = f"{digest}  {DATA_FILE}\n"
    return f"sha256:{hashlib.sha256(listing.encode('ascii')).hexdigest()}"


def asset_path(digest: str) -> str:
    """Return the path in the package of a data file with this SHA-256."""
    return f"{_ASSETS}{asset_uri(digest).replace(':', '-')}/{DATA_FILE}"


def execution_provider(device: Device) -> str:
    """Return ONNX Runtime's name for the provider of a device.

    Raises:
        PackageError: nothing of ONNX Runtime does.
    """
    from rlx_ort.providers.registry import default_registry

    provider = default_registry().for_device(device)
    if provider is None or not provider.ep_name:
        raise PackageError(f"no execution provider of ONNX Runtime runs {device.display}, so it can have no variant")
    return provider.ep_name


def manifest_bytes(name: str, version: str, variants: Mapping[str, tuple[Device, str]]) -> bytes:
    """Return `manifest.json`; variants come with their device and the URI of the asset with their weights, if any."""
    bodies: dict[str, Any] = {}
    for variant, (device, uri) in variants.items():
        info: dict[str, Any] = {"model_file": MODEL_FILE}
        if uri:
            info["session_options"] = {_FOLDER_KEY: uri}
        # No `device`: a provider that is appended by name has no hardware metadata, and ONNX Runtime 1.31.1 then passes
        # over every variant that names one, the CPU's included.
        ep = execution_provider(device)
        bodies[variant] = {"variant_directory": variant, "ep": ep, "executor_info": {"ort": info}}
    document: dict[str, Any] = {
        "schema_version": "1.0",
        "package_name": name,
        "components": {COMPONENT: {"variants": bodies}},
        "additional_metadata": _PRODUCER,
    }
    if version:
        document["package_version"] = version
    return dump(document)


def check_manifest(data: bytes, files: Collection[str]) -> None:
    """Refuse a manifest with keys that this library does not write, or with names that are not in the package.

    ONNX Runtime must act on checked files only: the sole session option in a manifest is the folder of the weights, and
    every path is one of the package.

    Raises:
        IntegrityError: the manifest is refused; the message has the reason.
    """
    top = parse(data, MANIFEST)
    top.only("schema_version", "package_name", "package_version", "components", "additional_metadata")
    if top.text("schema_version") != "1.0" or top.fields("additional_metadata").raw != _PRODUCER:
        raise IntegrityError(f"{MANIFEST} of the package is not of the schema that this library writes")
    components = top.entries("components")
    if list(components) != [COMPONENT]:
        raise IntegrityError(f"{MANIFEST} of the package should have one component named {COMPONENT!r}")
    components[COMPONENT].only("variants")
    assets = {f"sha256:{name.split('/')[1].removeprefix('sha256-')}" for name in files if name.startswith(_ASSETS)}
    for name, body in components[COMPONENT].entries("variants").items():
        body.only("variant_directory", "ep", "executor_info")
        body.fields("executor_info").only("ort")
        info = body.fields("executor_info").fields("ort")
        info.only("model_file", "session_options")
        options = info.fields("session_options")
        options.only(_FOLDER_KEY)
        model = f"{body.text('variant_directory')}/{info.text('model_file')}"
        folder = options.text(_FOLDER_KEY, "")
        if not body.text("ep") or model not in files or (folder and folder not in assets):
            raise IntegrityError(f"{MANIFEST} of the package names things for variant {name!r} that are not in it")

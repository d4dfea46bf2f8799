"""Options and arguments that several commands share, and reading the files that they name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rlx_ort.cli.show import note, progress

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rlx_ort.deploy.package import Package
    from rlx_ort.device import Device
    from rlx_ort.graph_devices import GraphDevices
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.resilience.options import Resilience
    from rlx_ort.selection.policy import DevicePolicy

Command = TypeVar("Command", bound=Callable[..., Any])

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
"""The type of an option or argument that names a file to read."""

PACKAGE = click.Path(exists=True, path_type=Path)
"""The type of an argument that names a package, in a folder or in a file."""


class DeviceNames(click.types.StringParamType):
    """The type of options that name devices; a shell completes the last name of a list."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text; several names for an option that takes one device are refused."""
        if "," in value and param is not None and param.metavar == "DEVICE":
            raise click.BadParameter(f"{value!r} has several devices, and this option takes one", ctx, param)
        return super().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the completions of the text: each device after the names that are there already."""
        from click.shell_completion import CompletionItem

        from rlx_ort.device import Device

        before, comma, begun = incomplete.rpartition(",")
        labels = [device.label for device in Device.all() if device.label.startswith(begun.lower())]
        return [CompletionItem(f"{before}{comma}{label}") for label in labels]


class Aliased(click.Option):
    """An option of which help shows the first name; the others are older names that still work."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the first name and the help."""
        names, self.opts = self.opts, self.opts[:1]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


def device_option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """Return a decorator for an option that names one device or several; only its first name is shown."""
    return click.option(*names, cls=Aliased, type=DeviceNames(), **{"metavar": "DEVICES", **settings})


def field(*names: str, **settings: Any) -> Any:
    """Return a field of a table of options; the arguments are those of `click.option`."""
    return dataclasses.field(metadata={"names": names, **settings})


def table(kind: type[Any]) -> Callable[[Command], Command]:
    """Add an option for each field of a dataclass; the command gets an instance of it as `given`."""
    columns = [(each.name, dict(each.metadata)) for each in dataclasses.fields(kind)]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_table(*args: Any, **values: Any) -> Any:
            return command(*args, given=kind(**{name: values.pop(name) for name, _ in columns}), **values)

        decorated = with_table
        for name, settings in reversed(columns):
            decorated = click.option(*settings.pop("names"), name, **settings)(decorated)
        return decorated  # type: ignore[return-value]  # a command of the same name and options

    return decorate


def _parse_dims(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text in values:
        name, equals, size = text.rpartition("=")
        if "=" in name and "," in name:
            raise click.BadParameter(f"{text!r} has several dims; repeat --dim for each", ctx, param)
        if not (name and equals and size.isascii() and size.isdigit()):
            raise click.BadParameter(f"{text!r} is not NAME=SIZE with a whole number, as in batch=4", ctx, param)
        if sizes.setdefault(name, int(size)) != int(size):
            raise click.BadParameter(f"{name!r} is given twice, as {sizes[name]} and {size}", ctx, param)
    return sizes


def _required_key(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse an empty `RLX_PACKAGE_KEY`, which click takes for an unset one."""
    from rlx_ort.deploy.names import required_key

    required_key(value)
    return value


_TRUSTED = "rlx_ort.trusted_links"


def _keep_trusted(ctx: click.Context, param: click.Parameter, folders: tuple[Path, ...]) -> None:
    ctx.meta[_TRUSTED] = folders


def trusted_links() -> tuple[Path, ...]:
    """Return the folders of --trust-links of the command that runs, for the readers of its model."""
    ctx = click.get_current_context(silent=True)
    return () if ctx is None else ctx.meta.get(_TRUSTED, ())


trust_links = click.option(
    "--trust-links",
    multiple=True,
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    callback=_keep_trusted,
    expose_value=False,
    help="Follow links of the model's files into this folder, as in Hugging Face's cache; may be repeated.",
)
"""Adds --trust-links, which `trusted_links` returns."""


def model(command: Command) -> Command:
    """Add the model: ONNX, the IR's JSON, a program of PyTorch or a package, recognised by its content."""
    return click.argument("model", type=PACKAGE)(trust_links(command))


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else.")

all_rows = click.option("--all", "all_rows", is_flag=True, help="Show what the devices need that are not here.")

dims = click.option(
    "--dim", "dims", multiple=True, metavar="NAME=SIZE", callback=_parse_dims, help="Fix a named dim; may be repeated."
)

key = click.option(
    "--key",
    type=FILE,
    envvar="RLX_PACKAGE_KEY",
    callback=_required_key,
    help="A PEM file with the public key that must have signed the package. Default: RLX_PACKAGE_KEY.",
)


def policy(*, device_too: bool = False, from_env: bool = True) -> Callable[[Command], Command]:
    """Add --only, --deny and --prefer; the command gets their `DevicePolicy` as `policy`.

    Args:
        device_too: whether --device is an older name for --only, in commands that do not run on one device.
        from_env: whether the options narrow the policy of the RLX_* variables; see `policy_of`.
    """
    only = ("--only", "--device", "--devices") if device_too else ("--only",)

    def decorate(command: Command) -> Command:
        @device_option(*only, "only", help="Allow these devices only, as in cpu,webgpu.")
        @device_option("--deny", help="Never use these devices.")
        @device_option("--prefer", help="Prefer these devices where predictions are close.")
        @functools.wraps(command)
        def with_policy(*args: Any, only: str | None, deny: str | None, prefer: str | None, **given: Any) -> Any:
            return command(*args, policy=policy_of(only, deny, prefer, from_env=from_env), **given)

        return with_policy  # type: ignore[return-value]  # a command of the same name and options

    return decorate


def package(command: Command) -> Command:
    """Add the argument PACKAGE, --key, --sha256 and --min-serial; the command gets the open `Package` first."""

    @click.argument("package", type=PACKAGE)
    @key
    @click.option("--sha256", metavar="HEX", help="The digest the package must have, as `inspect` prints it.")
    @click.option(
        "--min-serial", default=0, type=click.IntRange(min=0), help="Refuse packages with a lower serial number."
    )
    @functools.wraps(command)
    def with_package(package: Path, key: Path | None, sha256: str | None, min_serial: int, **given: Any) -> Any:
        from rlx_ort.deploy.package import Package

        with Package(package, key=key, sha256=sha256, min_serial=min_serial) as opened:
            return command(opened, **given)

    return with_package  # type: ignore[return-value]  # a command of the same name and options


def run_once(otherwise: str) -> Callable[[Command], Command]:
    """Add the options of a command that runs a model once.

    Args:
        otherwise: which inputs are used without --inputs.
    """

    def decorate(command: Command) -> Command:
        inputs = f"An npz file with an array for each input; without it, {otherwise}."
        for option in (
            as_json,
            dims,
            policy(),
            device_option("--device", metavar="DEVICE", help="Run on this device, or fail."),
            click.option(
                "--outputs",
                "outputs_path",
                type=click.Path(dir_okay=False, path_type=Path),
                help="Write the outputs to this npz file; sequences as NAME[0] and on, maps as NAME.keys and .values.",
            ),
            click.option("--inputs", "inputs_path", type=FILE, help=inputs),
        ):
            command = option(command)
        return command

    return decorate


def policy_of(only: str | None, deny: str | None, prefer: str | None, *, from_env: bool = True) -> DevicePolicy:
    """Return the policy of the RLX_* variables, or without them, narrowed by the options.

    `--only` replaces RLX_DEVICES; `--deny` and `--prefer` add to RLX_DENY_DEVICES and RLX_PREFER_DEVICES.

    Raises:
        DeviceParseError: a device name, in an option or a variable, does not parse.
    """
    from dataclasses import replace

    from rlx_ort.device import parse_device_list
    from rlx_ort.selection.policy import DevicePolicy

    policy = DevicePolicy.from_env() if from_env else DevicePolicy()
    if only:
        policy = replace(policy, allow=tuple(parse_device_list(only)))
    if deny:
        policy = policy.with_deny(parse_device_list(deny))
    if prefer:
        policy = policy.with_prefer(parse_device_list(prefer))
    return policy


def permitted(name: str) -> Device:
    """Return the device of a name, for commands that run on just that device.

    Raises:
        DeviceParseError: the name, or an RLX_* variable, does not parse.
        NoViableDeviceError: the RLX_* variables deny the device.
    """
    from rlx_ort.device import parse_device
    from rlx_ort.errors import NoViableDeviceError
    from rlx_ort.selection.policy import DevicePolicy

    device = parse_device(name)
    refusal = DevicePolicy.from_env().refusal(device)
    if refusal is not None:
        message = "the RLX_* variables do not allow a device; choose another with --device, or change the variables:"
        raise NoViableDeviceError(message, [(device, refusal)])
    return device


def each_once(devices: Iterable[Device], package: Package | None = None, *, named: bool = True) -> list[Device]:
    """Return the devices without those that are another name of one before, which are printed if they were `named`.

    A package may run in another precision under another name, which is then another device.
    """
    from rlx_ort.providers.registry import same_hardware

    settings = None
    if package is not None:
        from rlx_ort.deploy.open import options_of

        settings = options_of(package)
    firsts: dict[object, Device] = {}
    for device in devices:
        precision = None if settings is None else settings.on(device).key
        first = firsts.setdefault(((same_hardware(device) or [device])[0], precision), device)
        if first != device and named:
            note(f"{device.label} is the same device as {first.label}, which has the result")
    return list(firsts.values())


def note_assumed(done: str, sizes: Mapping[str, int]) -> None:
    """Print the assumed sizes of dims, if there are any."""
    if sizes:
        note(f"{done} with {', '.join(f'{name}={size}' for name, size in sizes.items())}; give sizes with --dim")


@contextlib.contextmanager
def opened(
    path: Path,
    policy: DevicePolicy,
    compile_options: CompileOptions,
    resilience: Resilience | None = None,
    *,
    admit: bool = False,
) -> Iterator[GraphDevices]:
    """Give a runner for a model, or for a package with its own policy, dims and precisions, narrowed by the caller's.

    The key of `RLX_PACKAGE_KEY` must have signed a package. With `admit` its golden cases are run where it asks for it.

    Raises:
        ConversionError: the file is no model, is damaged, or its weight files are missing.
        GraphVerifyError: the graph has no dim that the options name.
        PackageError: the package cannot be opened.
    """
    from rlx_ort.deploy.names import is_package
    from rlx_ort.graph_devices import GraphDevices

    with contextlib.ExitStack() as stack:
        if is_package(path):
            from rlx_ort.deploy.golden import admit_devices
            from rlx_ort.deploy.names import required_key
            from rlx_ort.deploy.open import PackageDevices, narrowed_policy, options_of
            from rlx_ort.deploy.package import Package

            package = stack.enter_context(Package(path, key=required_key(None)))
            policy = narrowed_policy(package.index.policy, policy)
            settings = options_of(package, compile_options)
            runner: GraphDevices = PackageDevices(package, policy, settings, resilience=resilience)
            if admit and package.index.verify_on_first_use:
                admit_devices(package, runner)
        else:
            graph = read_model(path, compile_options.dims)
            runner = GraphDevices(graph, policy, compile_options, resilience=resilience)
        yield stack.enter_context(runner)


def read_model(path: Path, dims: Iterable[str] = ()) -> Graph:
    """Return the graph of a model file or package, with a spinner while a large one is read.

    Raises:
        ConversionError: the file is no model, is damaged, or its weight files are missing.
        GraphVerifyError: the graph has no dim of one of the names in `dims`.
        PackageError: the package cannot be opened.
    """
    from rlx_ort.converters.files import load_graph
    from rlx_ort.ir.graph import check_dims

    with progress(f"reading {path}"):
        packaged = read_packaged(path)
        graph = load_graph(path, trusted_links=trusted_links()) if packaged is None else packaged[0]
    check_dims(graph, dims)
    return graph


def read_packaged(path: Path, compile_options: CompileOptions | None = None) -> tuple[Graph, CompileOptions] | None:
    """Return the graph of a package and the options with its dims and precisions; None for anything but a package.

    The caller's dims and precisions come first. The key of `RLX_PACKAGE_KEY` must have signed the package.

    Raises:
        PackageError: the package cannot be opened.
    """
    from rlx_ort.deploy.names import is_package, required_key

    if not is_package(path):
        return None
    from rlx_ort.deploy.open import options_of
    from rlx_ort.deploy.package import Package

    package = Package(path, key=required_key(None))  # closes itself when the weights are unused
    return package.graph(), options_of(package, compile_options)

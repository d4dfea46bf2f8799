"""The options of commands, a row each, the rows that several share, and opening the models that they name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

import rlx_ort
from rlx_ort.cli.show import note, progress, set_loudness

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from rlx_ort.deploy.package import Package

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
"""The type of a file to read."""

PRECISIONS = "f32 tf32 f16 bf16 / fp32 float32 fp16 float16 half bfloat16"
"""The words of a `choice` of precision."""

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
"""The type of a folder to read."""

PACKAGE = click.Path(exists=True, path_type=Path)
"""The type of a model or package, which may be a folder."""

WRITTEN = click.Path(dir_okay=False, path_type=Path)
"""The type of a file to write."""


def command(
    name: str, group: click.Group | None = None, rows: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., object]], click.Command]:
    """Return a decorator that makes a command of a function, in a group or on its own.

    The default of each parameter is a row of the functions below; the function gets the value of its option. `rows` has
    further ones, for a function with `**` parameters.
    """

    def decorate(function: Callable[..., object]) -> click.Command:
        parameters = inspect.signature(function).parameters.values()
        table = {each.name: each.default for each in parameters if isinstance(each.default, _Row)} | {**(rows or {})}

        @functools.wraps(function)
        def call(**values: Any) -> object:
            return function(**{field: row.value(field, values) for field, row in table.items()})

        params = [param for field, row in table.items() for param in row.params(field)]
        summary = " ".join((function.__doc__ or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."
        made: click.Command = (group or click).command(name, params=params + loudness(hidden=True), short_help=summary)(
            call
        )
        return made

    return decorate


def loudness(*, hidden: bool = False) -> list[click.Parameter]:
    """Return the options --verbose and --quiet, which stand before a command or among its own options."""
    settings: dict[str, Any] = {"expose_value": False, "callback": set_loudness, "hidden": hidden}
    return [
        click.Option(["-v", "--verbose"], count=True, help="Log each step to stderr; -vv logs more.", **settings),
        click.Option(["-q", "--quiet"], is_flag=True, help="Print results and errors only, no notes.", **settings),
    ]


@dataclasses.dataclass(frozen=True)
class _Row:
    """One parameter of a command by the names of its options, an empty one for that of the parameter itself."""

    made: Mapping[str, Callable[[str], click.Parameter]]
    convert: Callable[..., Any] | None = None

    def params(self, field: str) -> list[click.Parameter]:
        return [make(name or field) for name, make in self.made.items()]

    def value(self, field: str, values: Mapping[str, Any]) -> Any:
        given = [values[name or field] for name in self.made]
        return given[0] if self.convert is None else self.convert(*given)


def option(
    names: str,
    help: str,
    cls: type[click.Option] = click.Option,
    read: Callable[[Any], object] | None = None,
    **settings: Any,
) -> Any:
    """Return the row of an option: its names, its help, and the other arguments of `click.Option`.

    A default is shown unless it is 0 or empty. `read` makes the value; a `click.BadParameter` of it names the option.
    """
    settings = {"show_default": bool(settings.get("default")), **settings}
    if read is not None:
        settings["callback"] = lambda ctx, param, value: read(value)
    return _Row({"": lambda field: cls([*names.split(), field], help=help, **settings)})


def argument(**settings: Any) -> Any:
    """Return the row of an argument; the arguments are those of `click.Argument`."""
    return _Row({"": lambda field: click.Argument([field], **settings)})


def joined(convert: Callable[..., Any], **rows: Any) -> Any:
    """Return a row whose value is made of the values of several rows, by a function that takes them in order."""
    return _Row({name: row.made[""] for name, row in rows.items()}, convert)


def flag(names: str, help: str) -> Any:
    """Return the row of an option without a value."""
    return option(names, help, is_flag=True)


def whole(names: str, help: str, least: int = 0, **settings: Any) -> Any:
    """Return the row of an option that is a whole number."""
    return option(names, help, type=Whole(least), **settings)


def number(names: str, help: str, **settings: Any) -> Any:
    """Return the row of an option that is a number from 0."""
    return option(names, help, type=_Number(min=0), **settings)


def seconds(names: str, help: str, *, unit: str = "s", least: float = 0.0, **settings: Any) -> Any:
    """Return the row of an option that is a time, in seconds or in another unit of `Duration`."""
    return option(names, help, type=Duration(unit, least), **settings)


class Whole(click.IntRange):
    """The type of options that are a whole number within limits."""

    name = "whole number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return how help names the value."""
        return "NUMBER"


class _Number(click.FloatRange):
    """The type of options that are a finite number within limits."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail."""
        if not math.isfinite(found := super().convert(value, param, ctx)):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found


class Duration(click.types.FloatParamType):
    """The type of options that are a time: a number of the option's own unit, or one with a unit, as 60s or 2min."""

    name = "time"
    units: ClassVar[Mapping[str, float]] = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
    """The units and their seconds."""

    def __init__(self, unit: str, least: float) -> None:
        self._unit, self._least = unit, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the time in the option's unit, or fail with the form of a time."""
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(ms|s|min|h)?", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a time such as 60, 60s, 500ms or 2min", param, ctx)
        found = float(match[1]) * self.units[match[2] or self._unit] / self.units[self._unit]
        if found < self._least:
            self.fail(f"{value!r} is less than {self._least:g} {self._unit}", param, ctx)
        return found


def choice(names: str, help: str, values: str, **settings: Any) -> Any:
    """Return the row of an option that is one of some words; those after a slash are understood and not listed."""
    listed, _, understood = values.partition("/")
    return option(names, help, type=_Choice(listed.split(), understood.split()), **settings)


class _Choice(click.Choice[str]):
    """The type of options that are one of some words."""

    def __init__(self, listed: Sequence[str], understood: Sequence[str]) -> None:
        super().__init__(listed)
        self._understood = understood

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the word, or fail with those that are listed."""
        return value if value in self._understood else super().convert(value, param, ctx)


def file(names: str, help: str, **settings: Any) -> Any:
    """Return the row of an option that names a file to read."""
    return option(names, help, type=FILE, **settings)


def written(names: str, help: str) -> Any:
    """Return the row of an option that names a file to write."""
    return option(names, help, type=WRITTEN)


def mapping(
    names: str,
    help: str,
    metavar: str,
    form: str,
    example: str,
    read: Callable[[str], Any] = str,
    name_of: Callable[[str], str] = str,
) -> Any:
    """Return the row of an option that is repeated for each name; its value is the dict of names and values.

    `form` is a regular expression with a group for the name and one for the value, of which `name_of` and `read` make
    the entry. Another form, and a `ValueError` of `read`, are wrong usage.
    """

    def collected(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for text in texts:
            match = re.fullmatch(form, text, re.DOTALL)
            if match is None:
                raise click.BadParameter(f"{text!r} is not {metavar}, as in {example}")
            name = name_of(match[1])
            if "=" in name and "," in name:
                raise click.BadParameter(f"{text!r} has several names; repeat {param.opts[0]} for each")
            try:
                value = read(match[2])
            except ValueError as err:
                raise click.BadParameter(f"{text!r} is not {metavar}, as in {example}: {err}") from err
            if values.setdefault(name, value) != value:
                raise click.BadParameter(f"{name!r} is given twice, as {values[name]} and {value}")
        return values

    return option(names, help, metavar=metavar, multiple=True, callback=collected)


def devices(names: str, help: str, **settings: Any) -> Any:
    """Return the row of an option that names devices; only its first name is shown."""
    return option(names, help, cls=Aliased, type=DeviceNames(), **{"metavar": "DEVICES", **settings})


def device(help: str, names: str = "--device", **settings: Any) -> Any:
    """Return the row of an option that names one device."""
    return devices(names, help, metavar="DEVICE", **settings)


class DeviceNames(click.types.StringParamType):
    """The type of options that name devices; a shell completes the last name of a list."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text; several names for an option that takes one device are refused."""
        if "," in value and param is not None and param.metavar == "DEVICE":
            raise click.BadParameter(
                f"{value!r} has several devices, and {param.opts[0]} takes one; `run --chain` tries several in order",
                ctx,
                param,
            )
        return super().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the completions of the text: each device after the names that are there already."""
        from click.shell_completion import CompletionItem

        before, comma, begun = incomplete.rpartition(",")
        labels = [device.label for device in rlx_ort.Device.all() if device.label.startswith(begun.lower())]
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


def _required_key(value: Path | None) -> Path | None:
    """Refuse an empty `RLX_PACKAGE_KEY`, which click takes for an unset one."""
    from rlx_ort.deploy.names import required_key

    required_key(value)
    return value


_TRUSTED = "rlx_ort.trusted_links"


def _keep_trusted(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    click.get_current_context().meta[_TRUSTED] = folders
    return folders


def trusted_links() -> tuple[Path, ...]:
    """Return the folders of --trust-links of the command that runs, for the readers of its model."""
    ctx = click.get_current_context(silent=True)
    return () if ctx is None else ctx.meta.get(_TRUSTED, ())


AS_JSON: Any = flag("--json", "Print one JSON document on stdout and nothing else.")

ALL_ROWS: Any = flag("--all", "Show the packages that the missing devices need.")


def _size(text: str) -> int:
    size = int(text)
    if size < 1:
        raise ValueError("a size is 1 or more")
    return size


DIMS: Any = mapping("--dim", "Fix a named dim; may be repeated.", "NAME=SIZE", "(.+)=([0-9]+)", "batch=4", _size)
"""The sizes of named dims."""

PRECISION: Any = option(
    "--precision",
    "Compute f32 in this precision. Default: f32, or that of a package.",
    type=_Choice(*map(str.split, PRECISIONS.split("/"))),
    read=lambda text: text and rlx_ort.Precision(text),
)
"""The precision to compute in, None for the usual one."""

KEY: Any = file(
    "--key",
    "A PEM file with the public key that must have signed the package. Default: RLX_PACKAGE_KEY.",
    envvar="RLX_PACKAGE_KEY",
    read=_required_key,
)

OUTPUTS: Any = written(
    "--outputs",
    "Write the outputs to this npz file; sequences as NAME[0] and on, maps as NAME.keys and .values.",
)

TRUST_LINKS: Any = option(
    "--trust-links",
    "Follow links of the model's files into this folder, as in Hugging Face's cache; may be repeated.",
    multiple=True,
    metavar="FOLDER",
    type=FOLDER,
    read=_keep_trusted,
)
"""Folders, which `trusted_links` returns as well."""


def model(**settings: Any) -> Any:
    """Return the row of a model: ONNX, the IR's JSON, a program of PyTorch or a package, recognised by its content."""
    rows = {"": argument(type=PACKAGE, **settings).made[""], "trust_links": TRUST_LINKS.made[""]}
    return _Row(rows, lambda path, folders: path)


def policy(*, device_too: bool = False, from_env: bool = True) -> Any:
    """Return the row of --only, --deny and --prefer, whose value is their `DevicePolicy`.

    Args:
        device_too: whether --device means the same as --only, in commands that do not run on one device.
        from_env: whether the options narrow the policy of the RLX_* variables; see `policy_of`.
    """
    only = "--device --only --devices" if device_too else "--only"
    return joined(
        functools.partial(policy_of, from_env=from_env),
        only=devices(only, "Allow these devices only, as in cpu,webgpu."),
        deny=devices("--deny", "Never use these devices."),
        prefer=devices("--prefer", "Prefer these devices where predictions are close."),
    )


def _package(path: Path, key: Path | None, sha256: str | None, min_serial: int) -> Package:
    from rlx_ort.deploy.package import Package

    opened = Package(path, key=key, sha256=sha256, min_serial=min_serial)
    return click.get_current_context().with_resource(opened)


OPEN_PACKAGE: Any = joined(
    _package,
    package=argument(type=PACKAGE),
    key=KEY,
    sha256=option("--sha256", "The digest the package must have, as `inspect` prints it.", metavar="HEX"),
    min_serial=whole("--min-serial", "Refuse packages with a lower serial number.", default=0),
)
"""A package that is open as long as the command runs; the options refuse another one than is wanted."""


def inputs(otherwise: str) -> Any:
    """Return the row of --inputs; `otherwise` says which inputs are used without it."""
    return file("--inputs", f"An npz file with an array for each input; without it, {otherwise}.")


def policy_of(
    only: str | None, deny: str | None = None, prefer: str | None = None, *, from_env: bool = True
) -> rlx_ort.DevicePolicy:
    """Return the policy of the RLX_* variables, or without them, narrowed by the options.

    `--only` replaces RLX_DEVICES; `--deny` and `--prefer` add to RLX_DENY_DEVICES and RLX_PREFER_DEVICES.

    Raises:
        DeviceParseError: a device name, in an option or a variable, does not parse.
    """
    policy = rlx_ort.DevicePolicy.from_env() if from_env else rlx_ort.DevicePolicy()
    if only:
        policy = dataclasses.replace(policy, allow=tuple(rlx_ort.parse_device_list(only)))
    if deny:
        policy = policy.with_deny(rlx_ort.parse_device_list(deny))
    if prefer:
        policy = policy.with_prefer(rlx_ort.parse_device_list(prefer))
    return policy


def placement_of(strict: bool | None) -> rlx_ort.PlacementRule | None:
    """Return the rule of `--strict/--assisted`; None where neither is given."""
    return None if strict is None else rlx_ort.PlacementRule.STRICT if strict else rlx_ort.PlacementRule.ASSISTED


def permitted(name: str) -> rlx_ort.Device:
    """Return the device of a name, for commands that run on just that device.

    Raises:
        DeviceParseError: the name, or an RLX_* variable, does not parse.
        NoViableDeviceError: the RLX_* variables deny the device.
    """
    device = rlx_ort.parse_device(name)
    refusal = rlx_ort.DevicePolicy.from_env().refusal(device)
    if refusal is not None:
        message = "the RLX_* variables do not allow a device; choose another with --device, or change the variables:"
        raise rlx_ort.NoViableDeviceError(message, [(device, refusal)])
    return device


def each_once(
    devices: Iterable[rlx_ort.Device], package: Package | None = None, *, named: bool = True
) -> list[rlx_ort.Device]:
    """Return the devices without those that are another name of one before, which are printed if they were `named`.

    A package may run in another precision under another name, which is then another device.
    """
    from rlx_ort.providers.registry import same_hardware

    settings = None
    if package is not None:
        from rlx_ort.deploy.open import options_of

        settings = options_of(package)
    firsts: dict[object, rlx_ort.Device] = {}
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


def note_shipped(labels: Iterable[str], advice: str = "not measured on this machine") -> None:
    """Print the devices that were predicted from profiles that come with the library, if there are any."""
    if names := ", ".join(dict.fromkeys(labels)):
        note(f"predicted from shipped default profiles, {advice}: {names}")


def random_inputs(graph: rlx_ort.Graph, sizes: Mapping[str, int]) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """Return random inputs of a graph, and the sizes of named dims that had to be assumed."""
    from rlx_ort import made_up
    from rlx_ort.selection.windows import fitting_sizes

    return made_up.random_inputs(graph.input_types, sizes, assume=fitting_sizes(graph, sizes))


def feeds(path: Path | None, runner: rlx_ort.GraphDevices) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """Return the inputs of a file, or random ones without it, and the sizes of named dims that had to be assumed."""
    if path is not None:
        return read_inputs(path, runner.graph.input_types), {}
    return random_inputs(runner.graph, runner.options.dims)


@contextlib.contextmanager
def opened(
    path: Path,
    policy: rlx_ort.DevicePolicy,
    compile_options: rlx_ort.CompileOptions,
    resilience: rlx_ort.Resilience | None = None,
    *,
    admit: bool = False,
    precision: rlx_ort.Precision | None = None,
) -> Iterator[rlx_ort.GraphDevices]:
    """Give a runner for a model, or for a package with its own policy, dims and precisions, narrowed by the caller's.

    A `precision` comes before those of the package.

    The key of `RLX_PACKAGE_KEY` must have signed a package. With `admit` its golden cases are run where it asks for it.

    Raises:
        ConversionError: the file is no model, is damaged, or its weight files are missing.
        GraphVerifyError: the graph has no dim that the options name.
        PackageError: the package cannot be opened.
    """
    from rlx_ort.deploy.names import is_package, required_key

    with contextlib.ExitStack() as stack:
        if is_package(path):
            from rlx_ort.deploy.golden import admit_devices
            from rlx_ort.deploy.open import PackageDevices, narrowed_policy, options_of
            from rlx_ort.deploy.package import Package

            package = stack.enter_context(Package(path, key=required_key(None)))
            policy = narrowed_policy(package.index.policy, policy)
            settings = _in_precision(options_of(package, compile_options), precision)
            runner: rlx_ort.GraphDevices = PackageDevices(package, policy, settings, resilience=resilience)
            if admit and package.index.verify_on_first_use:
                admit_devices(package, runner)
        else:
            graph, _ = read_model(path, compile_options)
            settings = _in_precision(compile_options, precision)
            runner = rlx_ort.GraphDevices(graph, policy, settings, resilience=resilience)
        yield stack.enter_context(runner)


def _in_precision(given: rlx_ort.CompileOptions, precision: rlx_ort.Precision | None) -> rlx_ort.CompileOptions:
    return given if precision is None else given.with_(precision=precision, precisions={})


def read_model(
    path: Path, compile_options: rlx_ort.CompileOptions | None = None, key: Path | None = None
) -> tuple[rlx_ort.Graph, rlx_ort.CompileOptions]:
    """Return the graph of a model or package, and the options, with the dims and precisions of a package.

    The caller's dims and precisions come first. The key, or that of `RLX_PACKAGE_KEY`, must have signed a package. A
    spinner is shown while a large model is read.

    Raises:
        ConversionError: the file is no model, is damaged, or its weight files are missing.
        GraphVerifyError: the graph has no dim that the options name.
        PackageError: the package cannot be opened.
    """
    from rlx_ort.converters.files import load_graph
    from rlx_ort.deploy.names import is_package, required_key
    from rlx_ort.ir.graph import check_dims

    settings = compile_options or rlx_ort.CompileOptions()
    dims = settings.dims
    with progress(f"reading {path}"):
        if is_package(path):
            from rlx_ort.deploy.open import options_of
            from rlx_ort.deploy.package import Package

            package = Package(path, key=required_key(key))  # closes itself when the weights are unused
            graph, settings = package.graph(), options_of(package, settings)
        else:
            graph = load_graph(path, trusted_links=trusted_links())
    check_dims(graph, dims)
    return graph, settings


def read_inputs(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of an npz file, in the types of a model's inputs where npz has no such type.

    Raises:
        InputError: the file is no npz archive, is damaged, or holds pickled objects.
    """
    from rlx_ort.cli.arrays import read_npz, to_declared_types

    return to_declared_types(read_npz(path), types)

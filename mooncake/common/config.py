"""Configuration: frozen msgspec Structs filled from a TOML file, `MOONCAKE_*` variables and command-line options, in
this order.

A section of the file is a struct: `[cluster]` is `ClusterConfig`, `[gateway]`, `[conductor]`, `[worker]`,
`[store-master]`,
`[store-node]` belong to the roles. Variables: `MOONCAKE_<FIELD>` for the cluster, `MOONCAKE_<SECTION>_<FIELD>` for a
role. Help texts are the fields' `msgspec.Meta(description=...)`, which the command line and docs share.
Does not know: the roles' structs. An unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec

from mooncake.common.errors import ConfigError

SECTIONS = ("cluster", "gateway", "conductor", "worker", "store-master", "store-node", "up")
_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 1 << 10, "m": 10**6, "mb": 10**6, "mib": 1 << 20}
_UNITS |= {"g": 10**9, "gb": 10**9, "gib": 1 << 30, "t": 10**12, "tb": 10**12, "tib": 1 << 40}

T = TypeVar("T", bound=msgspec.Struct)


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What all roles of one cluster share."""

    cluster: Annotated[
        str,
        msgspec.Meta(
            description="name of the cluster: clusters of different names share an etcd without meeting",
            pattern="^[A-Za-z0-9._-]{1,64}$",
        ),
    ] = "mooncake"
    etcd: Annotated[list[str], msgspec.Meta(description="etcd endpoints, host:port")] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:2379"]
    )
    cluster_token: Annotated[
        str,
        msgspec.Meta(description="shared secret of all roles; empty: no authentication. Prefer MOONCAKE_CLUSTER_TOKEN"),
    ] = ""
    host: Annotated[str, msgspec.Meta(description="address this role binds and is reached at")] = "127.0.0.1"
    lease_ttl_s: Annotated[
        float, msgspec.Meta(description="a role that etcd has not heard of for so long is probed", ge=2, le=600)
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], msgspec.Meta(description="least severe level that is logged")
    ] = "info"


class Option(msgspec.Struct, frozen=True):
    """One field as command line and docs see it."""

    name: str
    kind: Any
    default: Any
    help: str
    required: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def options(struct: type[msgspec.Struct]) -> list[Option]:
    """The fields of a config struct, in order, with `Annotated` taken apart."""
    found = []
    for field in msgspec.structs.fields(struct):
        kind, text = _unwrap(field.type)
        required = field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
        default = field.default
        if default is msgspec.NODEFAULT:
            default = None if required else field.default_factory()
        found.append(Option(field.name, kind, default, text, required))
    return found


def _unwrap(kind: Any) -> tuple[Any, str]:
    text = ""
    while typing.get_origin(kind) is Annotated:
        kind, *extras = typing.get_args(kind)
        text = next((m.description for m in extras if isinstance(m, msgspec.Meta) and m.description), text)
    if typing.get_origin(kind) in (Union, types.UnionType):
        inner = [a for a in typing.get_args(kind) if a is not type(None)]
        if len(inner) == 1:
            kind, nested = _unwrap(inner[0])
            text = text or nested
    return kind, text


# --- sources --------------------------------------------------------------------------------------------------------


def read_file(path: Path | None) -> dict[str, dict[str, Any]]:
    """Sections of a TOML file. Raises ConfigError for a missing file, bad TOML or an unknown section."""
    if path is None:
        return {}
    try:
        parsed = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    for section, value in parsed.items():
        if section not in SECTIONS:
            raise ConfigError(f"{path}: unknown section [{section}]{_nearest(section, SECTIONS)}")
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {section!r} must be a section, [{section}]")
    return parsed


def load(
    struct: type[T],
    section: str,
    *,
    file: Mapping[str, Mapping[str, Any]] | None = None,
    environ: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> T:
    """A validated `struct` from the file's section, the environment, and what was given on the command line (wins).

    Raises ConfigError naming the key, where it came from, and the nearest valid key when it is unknown.
    """
    known = {option.name: option for option in options(struct)}
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in (file or {}).get(section, {}).items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"unknown key {key!r} in [{section}]{_nearest(name, known)}")
        values[name] = _from_text(known[name], value) if isinstance(value, str) else value
        origin[name] = f"{key} in [{section}]"
    for variable, name, text in _variables(os.environ if environ is None else environ, section, known):
        values[name] = _from_text(known[name], text)
        origin[name] = variable
    for name, value in (given or {}).items():
        if value is not None:
            values[name] = _from_text(known[name], value) if isinstance(value, str) else value
            origin[name] = known[name].flag
    for name, option in known.items():
        if option.required and name not in values:
            raise ConfigError(f"{option.flag} is missing ({option.help})")
    return _validated(struct, values, origin)


def _variables(environ: Mapping[str, str], section: str, known: Iterable[str]) -> Iterable[tuple[str, str, str]]:
    prefix = "MOONCAKE_" if section == "cluster" else f"MOONCAKE_{section.upper().replace('-', '_')}_"
    names = {name.upper(): name for name in known}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(prefix):
            continue
        field = variable.removeprefix(prefix)
        if field in names:
            yield variable, names[field], text
        elif section not in ("cluster", "up"):  # MOONCAKE_* alone also names sections, and other tools' settings
            raise ConfigError(f"unknown variable {variable}{_nearest(field, names, prefix)}")


def _validated(struct: type[T], values: dict[str, Any], origin: dict[str, str]) -> T:
    for name, value in values.items():
        field = next(f for f in msgspec.structs.fields(struct) if f.name == name)
        try:
            values[name] = msgspec.convert(value, field.type, strict=False)
        except msgspec.ValidationError as error:
            text = str(error).replace(", got `str`", "")
            raise ConfigError(f"{origin[name]}: {text} (got {value!r})") from error
    return struct(**values)


def _nearest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.4)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; valid are {', '.join(sorted(valid))}"


def parse_size(text: str) -> int:
    """Bytes of "64", "64KiB", "2GiB", "1.5 GB". Raises ConfigError."""
    cleaned = text.strip().replace("_", "")
    digits = len(cleaned.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ "))
    number, unit = cleaned[:digits], cleaned[digits:].strip().lower()
    try:
        return round(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise ConfigError(f"{text!r} is not a size: write e.g. 268435456, 256MiB or 2GiB") from None


def _from_text(option: Option, text: Any) -> Any:
    if not isinstance(text, str):
        return text
    origin = typing.get_origin(option.kind) or option.kind
    if option.kind is int and option.name.endswith("_bytes"):
        return parse_size(text)
    if origin in (list, tuple, set, frozenset):
        return [part.strip() for part in text.split(",") if part.strip()]
    if origin is dict or (isinstance(origin, type) and issubclass(origin, msgspec.Struct)):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{option.flag}: not JSON: {error}") from error
    return text


# --- command line ---------------------------------------------------------------------------------------------------


def add_options(parser: argparse._ArgumentGroup | argparse.ArgumentParser, struct: type[msgspec.Struct]) -> None:
    """One option a field; absent ones stay None so that `load` can tell them from given ones."""
    for option in options(struct):
        text = option.help.replace("%", "%%")
        if not option.required and option.default not in (None, "", [], {}, ()):
            shown = ",".join(option.default) if isinstance(option.default, list) else option.default
            text += f" (default {shown})".replace("%", "%%")
        dest = option.name
        if option.kind is bool:
            parser.add_argument(option.flag, dest=dest, default=None, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = {int: "N", float: "X"}.get(option.kind, "TEXT")
            if option.name.endswith("_bytes"):
                metavar = "SIZE"
            if typing.get_origin(option.kind) is Literal:
                metavar = "{" + ",".join(str(a) for a in typing.get_args(option.kind)) + "}"
            parser.add_argument(option.flag, dest=dest, default=None, metavar=metavar, help=text)


def given_options(struct: type[msgspec.Struct], namespace: argparse.Namespace) -> dict[str, Any]:
    """What the command line said of this struct's fields."""
    return {o.name: v for o in options(struct) if (v := getattr(namespace, o.name, None)) is not None}

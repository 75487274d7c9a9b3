"""Parameter types of the command line, and options that several commands have."""

from collections.abc import Callable
from typing import Any

import click

from cluster.config import KV_BITS, KV_GROUP_SIZES

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Bytes(click.ParamType[int]):
    """A size such as 512MiB, 24GiB or a plain number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        text = str(value)
        for unit, factor in _UNITS.items():
            if text.endswith(unit):
                text, multiplier = text.removesuffix(unit), factor
                break
        else:
            multiplier = 1
        try:
            return int(float(text) * multiplier)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no size; write 512MiB, 24GiB or a number of bytes", param, ctx)


class TenantWeight(click.ParamType[tuple[str, float]]):
    """A name and a positive number, such as research=2."""

    name = "weight"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """(tenant, weight); the range is the config's to check."""
        tenant, is_given, weight = str(value).rpartition("=")
        try:
            number = float(weight)
        except ValueError:
            is_given = ""
        if not is_given:
            self.fail(f"{value!r} is no weight; write a tenant's name and a number, such as research=2", param, ctx)
        return tenant, number


class NamedFolder(click.ParamType[tuple[str, str]]):
    """A name and a folder, such as pirate=./adapters/pirate."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """(name, folder); whether the folder is there is for others to check."""
        name, separator, folder = str(value).partition("=")
        if not (separator and name and folder):
            self.fail(f"{value!r} is no NAME=DIR, such as pirate=./adapters/pirate", param, ctx)
        return name, folder


def quantization_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How keys and values are stored: parameters `kv_bits` and `kv_group_size`, named as mlx-lm names them."""
    bits, sizes = (" or ".join(map(str, known)) for known in (KV_BITS, KV_GROUP_SIZES))
    group = click.option(
        "--kv-group-size",
        default=None,
        type=int,
        help=f"Elements that share a scale: {sizes}.  [default: the larger that the heads allow]",
    )
    return click.option("--kv-bits", default=None, type=int, help=f"Quantise keys and values: {bits}.")(group(command))

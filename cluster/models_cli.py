"""`cidery models supported`: which families of mlx-lm run, how, and what that was verified by.

The table is generated (`python -m tests.golden`) from the worker's registry, from what the worker finds in each
family, and from a run of the equality sweep.
"""

import json
import sys
from importlib import resources
from typing import Any

import click
from rich.console import Console
from rich.table import Table

_TABLE = "supported_models.json"
_COLUMNS = {
    "family": "Family",
    "keeps": "Keeps",
    "runs": "Runs in",
    "prefix_cache": "Prefix cache",
    "max_logprob_error": "Largest difference",
}


@click.group()
def models() -> None:
    """What models can be served."""


@models.command(epilog="Example: cidery models supported --json | jq '.families[].family'")
@click.argument("family", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def supported(family: str | None, as_json: bool) -> None:
    """List the model families of mlx-lm that run here, or tell of one FAMILY (a config.json's model_type)."""
    table = read_table()
    known = {row["family"] for row in table["families"]} | {row["family"] for row in table["not_run"]}
    if family is not None:
        if family not in known:
            raise click.ClickException(
                f"family {family!r} is not in the table; a family that nobody has reviewed runs one sequence at a time"
            )
        table["families"] = [row for row in table["families"] if row["family"] == family]
        table["not_run"] = [row for row in table["not_run"] if row["family"] == family]
    if as_json:
        click.echo(json.dumps(table))
        return
    _show(table, Console(file=sys.stdout))


def read_table() -> dict[str, Any]:
    """The generated table."""
    table: dict[str, Any] = json.loads(resources.files("cluster").joinpath(_TABLE).read_text())
    return table


def _show(table: dict[str, Any], console: Console) -> None:
    if table["families"]:
        shown = Table(*_COLUMNS.values(), box=None)
        for row in table["families"]:
            shown.add_row(*(_cell(row[name]) for name in _COLUMNS))
        console.print(shown)
        console.print(
            f"\nVerified with {table['verified_with']}, by {table['verified_by']}: {table['what_was_verified']}"
        )
    for row in table["not_run"]:
        console.print(f"not verified: {row['family']}: {row['reason']}")


def _cell(value: str | float) -> str:
    return f"{value:.0e}" if isinstance(value, float) else value

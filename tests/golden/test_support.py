"""The table of supported models says what the code does now."""

import json

import pytest
from click.testing import CliRunner

from cluster.cli import main
from tests.golden import scenario, support
from tests.golden.cases import CASES, NOT_RUN, make_model


@pytest.fixture(scope="module")
def table():
    return json.loads(support.TABLE.read_text())


def test_table_is_what_the_registry_and_the_models_say(table):
    """All but the measured column; whoever changes the registry runs the sweep and writes the table anew."""
    rows = {row["case"]: row for row in table["families"]}
    assert set(rows) == set(CASES)
    for case in CASES:
        assert rows[case] == support.static_row(case, make_model(case)) | {
            "max_logprob_error": rows[case]["max_logprob_error"]
        }
        assert 0 <= rows[case]["max_logprob_error"] <= scenario.LOGPROB_TOLERANCE
    assert {row["family"]: row["reason"] for row in table["not_run"]} == NOT_RUN


def test_docs_page_shows_the_table(table):
    assert support.PAGE.read_text() == support.page_of(table)


def test_command_prints_the_table(table):
    told = CliRunner().invoke(main, ["models", "supported", "--json"])
    assert json.loads(told.stdout) == table
    shown = CliRunner().invoke(main, ["models", "supported"], env={"COLUMNS": "200"})
    assert all(row["family"] in shown.stdout for row in [*table["families"], *table["not_run"]])


def test_command_tells_of_one_family():
    shown = CliRunner().invoke(main, ["models", "supported", "qwen3_next"], env={"COLUMNS": "200"})
    assert "state" in shown.stdout
    assert "gemma3" not in shown.stdout
    unknown = CliRunner().invoke(main, ["models", "supported", "qwen9"])
    assert unknown.exit_code == 1
    assert "'qwen9' is not in the table" in unknown.output

"""`cidery route explain`, against a gateway's admin service that says what it is told to."""

import json
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from click.testing import CliRunner, Result

from cluster.cli import main
from protos.cidery.v1 import admin_pb2, admin_pb2_grpc


def candidate(mac: str, total_s: float, *, excluded: str = "", held: int = 0) -> admin_pb2.Candidate:
    return admin_pb2.Candidate(
        mac=mac,
        num_held_tokens=held,
        num_matched_tokens=held + 16,
        num_prefill_tokens=84 - held,
        wait_s=0.25,
        prefill_s=total_s - 0.25,
        total_s=total_s,
        excluded=excluded,
        groups=[
            admin_pb2.GroupDepth(group=0, kind="FullAttention", num_tokens=held + 16),
            admin_pb2.GroupDepth(group=1, kind="RecurrentState", num_tokens=held),
        ],
    )


ANSWER = admin_pb2.ExplainResponse(
    request_id="chatcmpl-1",
    num_prompt_tokens=100,
    chosen="mac-2",
    reason="mac-2 holds 64 of 100 prompt tokens [more than any other]",
    policy="predicted_seconds",
    candidates=[
        candidate("mac-1", 2.0),
        candidate("mac-3", 0.5, excluded="cordoned: fan"),
        candidate("mac-2", 1.125, held=48),
    ],
)


class Gateway(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.requests: list[admin_pb2.ExplainRequest] = []
        self.address = ""

    def Explain(  # noqa: N802
        self, request: admin_pb2.ExplainRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ExplainResponse:
        self.requests.append(request)
        if request.request_id == "nope":
            context.abort(grpc.StatusCode.NOT_FOUND, "request 'nope' is not among the last 1000 decisions")
        return ANSWER


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    service, server = Gateway(), grpc.server(futures.ThreadPoolExecutor(1))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield service
    server.stop(None).wait()


def explain(gateway: Gateway, *args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["route", "explain", "--address", gateway.address, *args], input=stdin)


def test_a_past_request_is_shown_by_mac_and_term(gateway: Gateway) -> None:
    result = explain(gateway, "chatcmpl-1")
    assert result.exit_code == 0, result.output
    assert gateway.requests == [admin_pb2.ExplainRequest(request_id="chatcmpl-1")]
    lines = result.output.splitlines()
    assert lines[0] == "chatcmpl-1: 100 prompt tokens, predicted_seconds"
    for name in ("FullAttention 0", "RecurrentState 1", "wait", "shared", "prefill", "decode", "stall", "pressure"):
        assert name in lines[2]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│ mac-" in line]
    assert [row[0] for row in rows] == ["mac-2", "mac-1", "mac-3"], "cheapest first, excluded last"
    assert rows[0] == [
        *("mac-2", "48", "64", "36", "64", "48"),
        *("0.250", "0.000", "0.875", "0.000", "0.000", "0.000", "1.125", "chosen"),
    ]
    assert rows[2][-1] == "cordoned: fan"
    assert lines[-1] == ANSWER.reason, "brackets are no markup"


def test_what_if_sends_the_prompt_and_the_model(gateway: Gateway, tmp_path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("from a file\n")
    assert explain(gateway, "--prompt", "Once").exit_code == 0
    assert explain(gateway, "--prompt-file", str(path), "--model", "m").exit_code == 0
    assert explain(gateway, "--prompt-file", "-", stdin="piped").exit_code == 0
    assert gateway.requests == [
        admin_pb2.ExplainRequest(text="Once"),
        admin_pb2.ExplainRequest(text="from a file\n", model="m"),
        admin_pb2.ExplainRequest(text="piped"),
    ]


def test_json_is_the_whole_answer(gateway: Gateway) -> None:
    found = json.loads(explain(gateway, "chatcmpl-1", "--json").output)
    assert found["chosen"] == "mac-2"
    assert found["candidates"][0]["mac"] == "mac-1"
    assert found["candidates"][0]["stall_s"] == 0.0
    assert found["candidates"][2]["groups"][1] == {"group": 1, "kind": "RecurrentState", "num_tokens": 48}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give one of REQUEST_ID, --prompt and --prompt-file"),
        (["x", "--prompt", "y"], "give one of REQUEST_ID, --prompt and --prompt-file"),
        (["x", "--model", "m"], "--model is for a prompt"),
    ],
)
def test_what_makes_no_sense_is_refused(gateway: Gateway, args: list[str], message: str) -> None:
    result = explain(gateway, *args)
    assert result.exit_code == 2
    assert message in result.output
    assert gateway.requests == []


def test_the_gateway_s_own_words_are_shown(gateway: Gateway) -> None:
    result = explain(gateway, "nope")
    assert result.exit_code == 1
    assert "request 'nope' is not among the last 1000 decisions" in result.output


def test_help_has_examples() -> None:
    output = CliRunner().invoke(main, ["route", "explain", "--help"]).output
    assert "cidery route explain --prompt 'Once upon a time'" in output

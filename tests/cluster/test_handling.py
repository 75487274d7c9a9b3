"""Handling is checked when it is made, whoever makes it."""

import pytest

from cluster.errors import InvalidRequest
from cluster.handling import Handling
from protos.cidery.v1 import handling_pb2


def test_nothing_said_is_the_default():
    assert Handling.from_proto(handling_pb2.Handling()) == Handling()


def test_everything_said_arrives():
    message = handling_pb2.Handling(
        tenant="research", priority=-100, retention_priority=8, pin_s=0.5, session="s", cache_salt="c"
    )
    assert Handling.from_proto(message) == Handling("research", -100, 8, 0.5, "s", "c")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tenant": "t" * 129}, "tenant: may have at most 128 characters, got 129"),
        ({"session": "s" * 129}, "session: may have at most 128 characters, got 129"),
        ({"tenant": "\ud800"}, "tenant: .*lone surrogate"),
        ({"priority": 101}, "priority: must be from -100 to 100, got 101"),
        ({"retention_priority": -9}, "retention_priority: must be from -8 to 8, got -9"),
        ({"pin_s": -1.0}, "pin_s: must be from 0 to 604800 seconds, got -1.0"),
        ({"pin_s": float("nan")}, "got nan"),
        ({"pin_s": float("inf")}, "got inf"),
    ],
)
def test_what_is_out_of_range_is_refused(fields, message):
    with pytest.raises(InvalidRequest, match=message):
        Handling(**fields)

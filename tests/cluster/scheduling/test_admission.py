"""What is refused at the door, and with which sum."""

from dataclasses import replace

import pytest

from cluster.scheduling.admission import check_request, max_length
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.errors import InvalidRequest, Refused, RequestTooLong
from tests.cluster.scheduling.rig import Rig, layout_of, request_of

CONFIG = SchedulerConfig(max_model_len=32)


def check(request, num_blocks=16):
    check_request(request, CONFIG, layout_of(num_blocks))


def test_length_is_cut_by_max_tokens_and_by_max_model_len():
    assert max_length(request_of("a", (1, 2, 3), 5), CONFIG) == 8
    assert max_length(request_of("a", (1, 2, 3), 500), CONFIG) == 32


def test_generated_tokens_count_against_max_tokens():
    assert max_length(request_of("a", (1, 2, 3), 5, generated=(4, 5)), CONFIG) == 8


@pytest.mark.parametrize("num_prompt_tokens", [0, 4])
def test_the_prompt_is_part_of_the_tokens(num_prompt_tokens):
    request = replace(request_of("a", (1, 2, 3)), num_prompt_tokens=num_prompt_tokens)
    with pytest.raises(
        InvalidRequest, match=f"request a: num_prompt_tokens must be 1 to 3 .*, got {num_prompt_tokens}"
    ):
        check(request)


def test_max_tokens_is_not_negative():
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 0, got -1"):
        check(request_of("a", (1, 2, 3), -1))


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("tenant_weight", 0.0, "from 1e-6 to 1e6"),
        ("tenant_weight", float("nan"), "from 1e-6 to 1e6"),
        ("tenant_weight", 5e-324, "from 1e-6 to 1e6"),
        ("retention_priority", 2000, "from -64 to 64"),
        ("pin_s", float("inf"), "at least 0 and finite"),
        ("pin_s", -1.0, "at least 0 and finite"),
    ],
)
def test_handling_stays_where_shares_and_ranks_are_finite(field, value, allowed):
    rig = Rig()
    with pytest.raises(InvalidRequest, match=f"request a: {field} must be {allowed}, got {value}"):
        rig.scheduler.add(replace(request_of("a", (1, 2, 3)), **{field: value}), 0.0)
    rig.scheduler.check()
    assert not rig.scheduler.abort("a"), "nothing is left of it"


def test_there_are_no_more_hashes_than_full_blocks():
    request = request_of("a", (1, 2, 3, 4, 5))
    check(request)
    check(replace(request, block_hashes=()))
    with pytest.raises(InvalidRequest, match="5 tokens fill 1 blocks of 4, got 2 block hashes"):
        check(replace(request, block_hashes=request.block_hashes * 2))


def test_a_prompt_leaves_room_for_one_token():
    check(request_of("a", tuple(range(31)), 1))
    with pytest.raises(RequestTooLong, match=r"a prompt of 32 tokens leaves none.* at most 31 fit max_model_len 32"):
        check(request_of("a", tuple(range(32)), 1))


def test_a_request_that_could_never_fit_alone_is_refused_with_the_sum():
    """The last token is sampled but not run: 13 tokens need the KV of 12, three blocks."""
    check(request_of("a", tuple(range(8)), 5), num_blocks=3)
    with pytest.raises(RequestTooLong, match=r"8 prompt tokens .* 6, .* = 14 tokens = 4 bytes of KV cache; it has 3"):
        check(request_of("a", tuple(range(8)), 6), num_blocks=3)


def test_every_refusal_is_one_kind_of_error():
    assert issubclass(RequestTooLong, Refused)
    assert issubclass(InvalidRequest, Refused)

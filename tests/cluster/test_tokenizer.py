"""Text survives the way to tokens and back, however it is cut."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import piece_encoder
from cluster.config import bundled_model
from cluster.errors import InvalidRequest, RequestTooLong
from cluster.piece_encoder import PieceEncoder
from cluster.tokenizer import MAX_MESSAGES, Detokenizer, StopStrings, Tokenizer

TOKENIZER = Tokenizer(Path(bundled_model()))
TOKENS = st.lists(st.integers(3, TOKENIZER.vocab_size - 1), max_size=60)


def chunks(items, cuts):
    """The items in pieces; `cuts` are lengths."""
    start = 0
    for length in cuts:
        yield items[start : start + length]
        start += length
    yield items[start:]


@given(tokens=TOKENS, cuts=st.lists(st.integers(1, 4), max_size=40))
@settings(deadline=None)
def test_pieces_add_up_to_the_whole_whatever_the_tokens(tokens, cuts):
    """Random tokens are mostly broken characters: the hardest case."""
    text = Detokenizer(TOKENIZER)
    shown = "".join(text.push(piece) for piece in chunks(tokens, cuts)) + text.flush()
    assert shown == TOKENIZER.decode(tokens)


@given(text=st.text(max_size=40))
@settings(deadline=None)
def test_no_piece_ever_shows_part_of_a_character(text):
    tokens = TOKENIZER.encode(text).token_ids
    detokenizer = Detokenizer(TOKENIZER)
    shown = ""
    for token in tokens:
        shown += detokenizer.push([token])
        assert TOKENIZER.decode(tokens).startswith(shown)
    assert shown + detokenizer.flush() == TOKENIZER.decode(tokens)


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)
def test_stop_strings_cut_exactly_where_a_search_of_the_whole_text_would(text, stops, cuts):
    """The first stop string that is complete ends the text, wherever the pieces are cut."""
    filter_ = StopStrings(stops)
    shown = ""
    for piece in chunks(text, cuts):
        shown += filter_.push(piece)
        assert not any(stop in shown for stop in stops)
    found = min(((text.find(stop), stop) for stop in stops if stop in text), default=None)
    if found is None:
        assert filter_.hit is None
        assert shown + filter_.flush() == text
    else:
        assert filter_.hit is not None
        assert text.startswith(shown + filter_.hit)


def test_text_that_may_begin_a_stop_string_is_withheld_and_then_shown():
    filter_ = StopStrings(["</end>"])
    assert filter_.push("hello </en") == "hello "
    assert filter_.push("try>") == "</entry>"
    assert filter_.push("</end> more") == ""
    assert filter_.hit == "</end>"
    assert filter_.push("anything") == ""


def test_messages_end_where_later_turns_share_the_prefix():
    """Each boundary is a prefix of the next turn's prompt, token by token."""
    messages = [
        {"role": "system", "content": "You are Pip."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "What is 2 + 2?"},
    ]
    whole = TOKENIZER.encode_chat(messages)
    assert len(whole.boundaries) == len(messages)
    for count, end in enumerate(whole.boundaries, start=1):
        shorter = TOKENIZER.encode_chat(messages[:count])
        assert shorter.token_ids[:end] == whole.token_ids[:end]
    assert whole.boundaries[-1] < len(whole.token_ids), "the assistant's turn has been opened"


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff not"])
def test_lone_surrogates_are_refused_by_position(text):
    with pytest.raises(InvalidRequest, match="lone surrogate at character"):
        TOKENIZER.encode(text)


def test_an_empty_conversation_is_refused():
    with pytest.raises(InvalidRequest, match="at least one message"):
        TOKENIZER.encode_chat([])


@given(text=st.text(max_size=30))
@settings(deadline=None)
def test_bytes_of_tokens_add_up_to_the_text(text):
    tokens = TOKENIZER.encode(text).token_ids
    assert b"".join(TOKENIZER.token_bytes(token) for token in tokens) == text.encode()


SPECIALS = [token.content for token in TOKENIZER._core.get_added_tokens_decoder().values()]


@given(st.lists(st.text(max_size=12) | st.sampled_from(SPECIALS), max_size=8).map("".join))
@settings(deadline=None, max_examples=300)
def test_pieces_give_the_tokens_of_the_whole_text(text):
    """Encoded piece by piece, for the first time and from what is kept, as the tokenizer encodes the whole."""
    whole = TOKENIZER._core.encode(text, add_special_tokens=False)
    for _ in range(2):
        token_ids, starts = TOKENIZER._encoder.encode(text)
        assert token_ids == whole.ids
        assert starts == [start for start, _ in whole.offsets]


def test_a_tokenizer_that_minds_the_beginning_of_a_text_is_asked_for_the_whole():
    """As SentencePiece's, which put a space in front of the first word."""
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Core

    core = Core(models.BPE({"a": 0, "▁": 1}, []))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.add_special_tokens([AddedToken("<s>", special=True)])
    encoder = PieceEncoder(core)
    for text in ("a<s>a", "<s>a a", "a"):
        whole = core.encode(text, add_special_tokens=False)
        assert encoder.encode(text) == (whole.ids, [start for start, _ in whole.offsets])


def test_what_is_kept_of_pieces_is_bounded(monkeypatch):
    monkeypatch.setattr(piece_encoder, "_MAX_CACHED_CHARACTERS", 100)
    encoder = PieceEncoder(TOKENIZER._core)
    for number in range(50):
        encoder.encode(f"{number:030d}")
        assert sum(map(len, encoder._cached)) == encoder._num_characters <= 100


@pytest.mark.parametrize("text", ["Hello 🙂!", "Hello 日本!", "é", "🙂", "a\N{REPLACEMENT CHARACTER}b"])
def test_characters_made_of_byte_tokens_are_shown_whole(text):
    """As SentencePiece's byte fallback, which decodes to one replacement for each byte of an unfinished character."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models

    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    core = Core(models.BPE(vocab, [], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    class ByteTokenizer:
        def decode(self, tokens):
            return core.decode(list(tokens))

    detokenizer, shown = Detokenizer(ByteTokenizer()), ""
    for token in core.encode(text).ids:
        shown += detokenizer.push([token])
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


def test_a_long_conversation_costs_a_few_renderings_and_a_longer_one_is_refused():
    messages = [{"role": "user", "content": "x"}] * MAX_MESSAGES
    assert len(TOKENIZER.encode_chat(messages).boundaries) <= 9
    with pytest.raises(InvalidRequest, match="at most 4096 messages"):
        TOKENIZER.encode_chat([*messages, messages[0]])


def test_a_text_too_long_whatever_its_tokens_is_refused_without_counting_them():
    TOKENIZER.check_length(len(TOKENIZER.decode(range(3, 1000))), 4_096)
    with pytest.raises(RequestTooLong, match=r"10000000 characters are at least \d+ tokens"):
        TOKENIZER.check_length(10_000_000, 4_096)


@given(st.text(max_size=200))
@settings(deadline=None)
def test_no_text_that_fits_is_refused_for_its_length(text):
    TOKENIZER.check_length(len(text), len(TOKENIZER.encode(text).token_ids))

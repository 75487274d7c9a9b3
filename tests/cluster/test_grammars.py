"""Bad grammars are refused with the compiler's words, good ones once compiled are known."""

from pathlib import Path

import pytest

from cluster import grammars
from cluster.config import bundled_model
from cluster.errors import InvalidRequest
from cluster.grammars import GrammarChecker
from cluster.tokenizer import Tokenizer

TOKENIZER = Tokenizer(Path(bundled_model()))

BAD = {
    "Invalid type: objekt": grammars.json_schema("f", {"type": "objekt"}),
    r'Unimplemented keys: \["contains"\]': grammars.json_schema("f", {"type": "array", "contains": {}}),
    "Unknown format: nope": grammars.json_schema("f", {"type": "string", "format": "nope"}),
    "incompatible types": grammars.json_schema("f", {"allOf": [{"type": "string"}, {"type": "number"}]}),
    "does not exist": grammars.json_schema("f", {"$ref": "#/nope"}),
    "Default retriever does not fetch resources": grammars.json_schema("f", {"$ref": "http://example.com/x.json"}),
    "no answer matches it": grammars.json_schema("f", {"$ref": "#"}),
    "unclosed group": grammars.regex("f", "(a"),
    "look-around": grammars.regex("f", "(?=a)b"),
    "backreferences": grammars.regex("f", r"(a)\1"),
    "nested parentheses|nest limit|nested record|brackets": grammars.regex("f", "(" * 5000 + "a" + ")" * 5000),
    "unknown name": grammars.lark("f", 'start: "a" | b'),
    "unknown special token": grammars.lark("f", "start: <|no_such|>"),
    "Expected token": grammars.lark("f", "not a grammar ("),
}


@pytest.fixture
async def checker():
    checker = GrammarChecker(TOKENIZER)
    checker.start()
    return checker


@pytest.mark.parametrize("message", BAD)
async def test_a_bad_grammar_is_refused_in_the_compilers_words(checker, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        await checker.check(BAD[message])
    assert caught.value.field == "f"
    assert "<state>" not in str(caught.value)
    assert len(str(caught.value)) < 2500


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.json_object("f"),
        grammars.json_schema_text("f", '{"type": "string", "maxLength": 3}'),
        grammars.regex("f", r"\d+(\.\d+)?"),
        grammars.choice("f", ["a", 'b"\n', "😀"]),
        grammars.lark("f", "start: <|im_start|> /a+/"),
    ],
)
async def test_a_good_grammar_is_compiled_once(checker, grammar, monkeypatch):
    await checker.check(grammar)
    monkeypatch.setattr(checker, "_compile", lambda *_: pytest.fail("compiled again"))
    await checker.check(grammar)


async def test_what_is_kept_of_good_grammars_is_bounded(checker, monkeypatch):
    monkeypatch.setattr(grammars, "_MAX_KEPT", 3)
    for number in range(5):
        await checker.check(grammars.regex("f", f"a{number}"))
    assert list(checker._good) == [grammars.regex("f", f"a{number}").source for number in (2, 3, 4)]


def test_a_schema_that_is_no_object_is_refused():
    for schema in (True, 5, [1], "text", None):
        with pytest.raises(InvalidRequest, match="must be a JSON schema: an object"):
            grammars.json_schema("f", schema)


async def test_a_deep_schema_is_refused_and_not_a_crash(checker):
    schema: dict = {"type": "string"}
    for _ in range(500):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="recursion limit exceeded"):
        await checker.check(grammars.json_schema("f", schema))


async def test_a_tokenizer_that_cannot_be_used_is_said_once_a_grammar_comes(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "definition", lambda: "{}")
    checker = GrammarChecker(TOKENIZER)
    checker.start()
    with pytest.raises(InvalidRequest, match="can't be held to a grammar"):
        await checker.check(grammars.regex("f", "a"))


def chain_of_rules(num_rules):
    return "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(num_rules)) + f'\na{num_rules}: "x"\n'


def chain_of_references(num_links):
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(num_links)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{num_links}": {"type": "integer"}}}


async def test_a_chain_as_long_as_allowed_is_compiled(checker):
    await checker.check(grammars.lark("f", chain_of_rules(grammars.MAX_LINKS - 2)))
    await checker.check(grammars.json_schema("f", chain_of_references(grammars.MAX_LINKS - 1)))


def test_a_longer_chain_is_refused_before_it_ends_the_process():
    """The compiler recurses: 3,000 links overflow its stack."""
    with pytest.raises(InvalidRequest, match="at most 1000 rules, got 3002"):
        grammars.lark("f", chain_of_rules(3000))
    with pytest.raises(InvalidRequest, match=r"at most 1000 references \(\$ref\), got 3001"):
        grammars.json_schema("f", chain_of_references(3000))


def test_colons_in_quotes_and_comments_are_no_rules():
    text = f'start: "{":" * 2000}" /{":" * 2000}/ // {":" * 2000}'
    assert grammars.lark("f", text).source.count(":") >= 6000
    assert grammars.choice("f", [":" * 200] * 20).source.count(":") >= 4000

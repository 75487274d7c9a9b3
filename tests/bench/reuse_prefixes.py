"""Who shares which prefix with whom: a radix tree over whole requests, and what an unbounded cache would hit."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

# Of typecode "I".
Tokens: TypeAlias = "array[int]"


def num_common(one: Tokens, other: Tokens) -> int:
    """Tokens that two sequences begin with in common."""
    length = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint32, length) != np.frombuffer(other, np.uint32, length) if length else ()
    return int(np.argmax(differ)) if np.any(differ) else length


@dataclass(eq=False, slots=True)
class Node:
    """Tokens `[start, start + len(token_ids))` of a prefix: all of them are in the same requests, `uses`, ascending."""

    start: int
    token_ids: Tokens
    uses: list[int] = field(default_factory=list)
    children: dict[int, "Node"] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """One past its last token's position."""
        return self.start + len(self.token_ids)

    def use_before(self, request: int) -> int | None:
        """The latest request before this one that had these tokens."""
        at = bisect_left(self.uses, request)
        return self.uses[at - 1] if at else None


def _insert(root: Node, token_ids: Tokens, request: int) -> None:
    node, depth = root, 0
    while depth < len(token_ids):
        child = node.children.get(token_ids[depth])
        if child is None:
            child = Node(depth, token_ids[depth:])
            node.children[token_ids[depth]] = child
        else:
            shared = num_common(child.token_ids, token_ids[depth:])
            if shared < len(child.token_ids):
                child = _split(node, child, shared)
        child.uses.append(request)
        node, depth = child, child.end


def _split(parent: Node, node: Node, at: int) -> Node:
    upper = Node(node.start, node.token_ids[:at], node.uses[:])
    parent.children[upper.token_ids[0]] = upper
    node.start, node.token_ids = node.start + at, node.token_ids[at:]
    upper.children[node.token_ids[0]] = node
    return upper


@dataclass(frozen=True, slots=True)
class Reusable:
    """One stretch of a request's prompt that an earlier request had: up to position `end`, last had by `last_use`."""

    end: int
    last_use: int


def reusable_prefixes(sequences: Sequence[Tokens], num_prompt_tokens: Sequence[int]) -> list[list[Reusable]]:
    """For each request the stretches, from the start, of what earlier ones had of it; answers count as had.

    At most num_prompt_tokens - 1 tokens, because one must run. The last stretch's end is what an unbounded cache hits.
    """
    root = Node(0, array("I"))
    for request, sequence in enumerate(sequences):
        _insert(root, sequence, request)
    result: list[list[Reusable]] = []
    for request, sequence in enumerate(sequences):
        limit = num_prompt_tokens[request] - 1
        path: list[Reusable] = []
        node = root
        while node.end < limit:
            node = node.children[sequence[node.end]]
            last_use = node.use_before(request)
            if last_use is None:
                break
            path.append(Reusable(min(node.end, limit), last_use))
        result.append(path)
    return result


def unbounded_hits(paths: Sequence[Sequence[Reusable]]) -> list[int]:
    """Tokens of each request that a token-granular cache without bounds would find."""
    return [path[-1].end if path else 0 for path in paths]

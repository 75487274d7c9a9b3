"""The self-test on the harness: right kernels pass, a broken one is found and named, what passed is remembered."""

import subprocess
import sys

import mlx.core as mx
import pytest

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from worker.evaluation import Inline
from worker.metal import self_test, self_test_cases
from worker.metal.decode_checks import LatentNeeds, VerifyNeeds
from worker.metal.dispatch import assemble
from worker.metal.in_place_writer import InPlaceWriter
from worker.metal.scatter_writer import ScatterWriter
from worker.metal.self_test import AttentionNeeds, Family, ResultMemory, RopeNeeds, run
from worker.metal.self_test_cases import FAMILIES
from worker.metal.state_self_test import ShortConvShape

_NEEDS = [
    AttentionNeeds(4, 2, 64, mx.float16, window=40, has_sinks=True, bits=8),
    AttentionNeeds(3, 1, 64, mx.float32, softcap=2.0),
    RopeNeeds(4, 2, 64, mx.float16, 32, is_traditional=False, has_freqs=True),
    AttentionNeeds(3, 1, 48, mx.float16, value_dim=32),
    LatentNeeds(5, 64, 32, mx.float16),
    LatentNeeds(5, 64, 32, mx.float16, bits=8),
]
_MACHINE = ("M9", "macOS 99", "1.0")


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()


@pytest.fixture(autouse=True)
def _short_chain(monkeypatch):
    monkeypatch.setattr(self_test_cases, "_CHAIN_STEPS", 5)
    monkeypatch.setattr(self_test_cases, "_CHAIN_LAYERS", 2)


class Broken:
    """The harness with one text in one kernel replaced."""

    def __init__(self, kernel: str, old: str, new: str) -> None:
        self._host, self._edit = MslHost(), (kernel, old, new)
        self.has_edited = False

    def __call__(self, *, name, source, header="", **rest):
        kernel, old, new = self._edit
        if name.startswith(kernel):
            self.has_edited |= old in source + header
            source, header = source.replace(old, new), header.replace(old, new)
        return self._host(name=name, source=source, header=header, **rest)


def test_all_families_pass_for_what_models_need():
    host = MslHost()
    report = run(FAMILIES, _NEEDS, host)
    assert report.failures == {}
    assert all(report.works(family.name) for family in FAMILIES)
    assert isinstance(assemble(host, _NEEDS, report.passed).make_writer(Inline()), InPlaceWriter)
    ran = {record.kernel for record in host.records}
    for kernel in (
        "write_kv",
        "put_blocks",
        "write_quantized",
        "paged_prefill",
        "paged_prefill_wide_latent",
        "paged_decode",
        "rope",
        "join",
    ):
        assert any(kernel in name for name in ran), kernel


@pytest.mark.parametrize(
    ("family", "kernel", "old", "new"),
    [
        ("write_kv", "cidery_write_kv", "target[i] = values[from", "target[i] = keys[from"),
        ("put_blocks", "cidery_put_blocks", "block >= 0", "block > 2"),
        ("write_quantized", "cidery_write_quantized", "edge / level;", "edge / (level * 1.1f);"),
        ("paged_prefill", "cidery_paged_prefill", "position - window + 1", "position - window - 3"),
        ("paged_prefill", "cidery_paged_prefill", "at >= first && at <= last", "at >= first"),
        ("paged_prefill", "cidery_paged_prefill_wide", "at < first || at > last", "at < first"),
        ("latent_prefill", "cidery_paged_prefill_wide_latent", "acc[s][d], key[g][d]", "acc[s][d], key[0][d]"),
        ("rope", "cidery_rope", "x * sine + y", "x * sine - y"),
        ("in_place", "cidery_put_blocks", "block >= 0", "block > 6"),
    ],
)
def test_a_broken_kernel_is_named_and_the_others_still_run(caplog, family, kernel, old, new):
    broken = Broken(kernel, old, new)
    report = run(
        [FAMILIES[0], *(f for f in FAMILIES[1:] if f.name in (family, "rope"))], [_NEEDS[0], *_NEEDS[2:]], broken
    )
    assert broken.has_edited
    assert set(report.failures) == {family}
    assert report.works("rope") == (family != "rope")
    assert not report.works(family)
    assert isinstance(assemble(broken, _NEEDS, report.passed).make_writer(Inline()), ScatterWriter)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"metal kernel {family} is off, plain MLX runs in its place: {report.failures[family]}"
    ]


@pytest.mark.parametrize("num_rows", [2, 3, 4, 5])
def test_each_number_of_rows_that_share_loads_is_tested(num_rows):
    """As many as the worker may guess, and one more; up to four where nobody said."""
    family = [family for family in FAMILIES if family.name == "verify_window"]
    broken = Broken("cidery_paged_decode", "* scale[0];", f"* scale[0] * (R == {num_rows} ? 1.01f : 1.0f);")
    need = AttentionNeeds(4, 2, 64, mx.float16)
    found = run(family, [need, VerifyNeeds(num_rows)], broken).failures
    assert found["verify_window"].startswith(f"{num_rows} rows that share loads differ")
    assert run(family, [need, VerifyNeeds(num_rows - 1)], broken).failures == {}
    assert bool(run(family, [need], broken).failures) == (num_rows <= 4)


@pytest.mark.parametrize("dtype", ["u32", "f16", "bf16"])
def test_moves_are_tested_in_each_kind_of_pool(dtype):
    """Packed words, their scales, and states."""
    family = [family for family in FAMILIES if family.name == "put_blocks"]
    states = ShortConvShape(32, 4, mx.bfloat16, mx.bfloat16, has_bias=False, has_silu=True)
    needs = [AttentionNeeds(4, 2, 64, mx.float16, bits=8), states]
    broken = Broken(f"cidery_put_blocks_{dtype}", "block >= 0", "block > 2")
    assert run(family, needs, MslHost()).failures == {}
    assert set(run(family, needs, broken).failures) == {"put_blocks"}
    assert broken.has_edited


def _memory(tmp_path, needs=_NEEDS, machine=_MACHINE):
    return ResultMemory(needs, machine, tmp_path)


def test_what_passed_is_not_run_again_until_something_changes(tmp_path, monkeypatch):
    runs = []
    family = Family("good", lambda metal_kernel, needs: runs.append(needs))
    for _ in range(3):
        report = run([family], _NEEDS, None, _memory(tmp_path))
    assert (len(runs), report.remembered) == (1, {"good"})
    run([family], _NEEDS, None, _memory(tmp_path, machine=("M9", "macOS 100", "1.0")))
    run([family], _NEEDS[:1], None, _memory(tmp_path, needs=_NEEDS[:1]))
    run([family], _NEEDS, None)
    assert len(runs) == 4
    monkeypatch.setattr(self_test, "kernel_hash", lambda: "other sources")
    run([family], _NEEDS, None, _memory(tmp_path))
    assert len(runs) == 5
    ResultMemory.forget_all(tmp_path)
    run([family], _NEEDS, None, _memory(tmp_path))
    assert len(runs) == 6


def test_a_failure_is_not_remembered(tmp_path):
    """It may have been the machine's bad moment; the next start tries again."""
    answers = iter(["wrong", None])
    family = Family("shaky", lambda metal_kernel, needs: next(answers))
    assert run([family], _NEEDS, None, _memory(tmp_path)).failures == {"shaky": "wrong"}
    assert run([family], _NEEDS, None, _memory(tmp_path)).failures == {}


def test_an_error_of_mlx_is_a_failure(tmp_path):
    def check(metal_kernel, needs):
        raise RuntimeError("unable to build metal library")

    report = run([Family("bad", check)], _NEEDS, None, _memory(tmp_path))
    assert report.failures == {"bad": "unable to build metal library"}
    assert _memory(tmp_path).num_ends("bad") == 0


_CRASH = """
import os, sys
from pathlib import Path
from worker.metal.self_test import Family, ResultMemory, run
run([Family("crash", lambda metal_kernel, needs: os._exit(7))], ["needs"], None,
    ResultMemory(["needs"], ("M9", "macOS 99", "1.0"), Path(sys.argv[1])))
"""


def test_a_kernel_that_ends_the_process_is_not_tried_a_third_time(tmp_path):
    """A worker that is started again and again would end again and again."""
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", _CRASH, str(tmp_path)]).returncode == 7
    memory = _memory(tmp_path, needs=["needs"])
    report = run([Family("crash", lambda metal_kernel, needs: None)], ["needs"], None, memory)
    assert "ended the process" in report.failures["crash"]
    ResultMemory.forget_all(tmp_path)
    assert run([Family("crash", lambda metal_kernel, needs: None)], ["needs"], None, memory).failures == {}


def test_trial_of_a_process_that_still_runs_is_no_end(tmp_path):
    memory = _memory(tmp_path)
    with memory.trying("slow"):
        assert memory.num_ends("slow") == 0


def test_pools_are_written_by_scatter_where_nothing_was_tested():
    assert isinstance(assemble(MslHost(), _NEEDS, run([], _NEEDS, None).passed).make_writer(Inline()), ScatterWriter)


def test_names_of_families_are_their_own():
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert all("." not in name for name in names), "a name is part of a file's name"


@pytest.mark.skipif(mx.metal.is_available(), reason="needs a machine without Metal")
def test_selftest_by_hand_says_why_there_is_nothing_to_test():
    done = subprocess.run(
        [sys.executable, "-c", "from cluster.cli import main; main()", "worker", "selftest", "--head-dim", "64", "96"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("This machine has no Metal")


def test_selftest_by_hand_refuses_what_it_does_not_know():
    command = [sys.executable, "-m", "worker.selftest", "--bits", "3"]
    assert subprocess.run(command, capture_output=True).returncode == 2

"""What is asked for on the command line reaches the settings of a Mac, and from there its worker."""

import pytest
from click.testing import CliRunner

from cluster import cli, serve, worker_process
from cluster.config import KVConfig, MacConfig


@pytest.fixture
def served(monkeypatch):
    """The settings that `cidery serve` would start with; it starts nothing."""
    found: list[serve.ServeConfig] = []
    monkeypatch.setattr(serve, "run", lambda config, console: found.append(config))
    monkeypatch.setattr(cli.ray_environment, "prepare", lambda is_local: None)

    def run(*arguments: str):
        result = CliRunner().invoke(cli.main, ["serve", *arguments])
        return result, found[-1].fleet.mac if found else None

    return run


def _told(mac, **how) -> dict[str, str]:
    options = worker_process._options(mac, **how)
    return dict(zip(options[::2], options[1::2], strict=True))


def test_quantised_kv_and_step_limits_reach_the_worker(served):
    arguments = ["--kv-bits", "4", "--kv-group-size", "32", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"]
    result, mac = served(*arguments, "--max-model-len", "900", "--disable-hybrid-kv-cache-manager")
    assert result.exit_code == 0, result.output
    assert mac.kv == KVConfig(kv_bits=4, kv_group_size=32, enable_hybrid=False)
    assert MacConfig.from_dict(mac.to_dict()) == mac
    assert _told(mac, measures_steps=True) == {
        "--block-size": "16",
        "--kv-bits": "4",
        "--kv-group-size": "32",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "128",
        "--max-model-len": "900",
    }
    assert set(_told(mac, measures_steps=False)) == {"--block-size", "--kv-bits", "--kv-group-size"}


def test_without_them_keys_stay_as_they_are(served):
    result, mac = served()
    assert result.exit_code == 0, result.output
    assert (mac.kv.kv_bits, mac.kv.kv_group_size) == (None, None)
    assert not {"--kv-bits", "--kv-group-size", "--max-model-len"} & set(_told(mac, measures_steps=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-bits", "5"], "kv_bits must be one of 4, 8, got 5"),
        (["--kv-bits", "8", "--kv-group-size", "128"], "kv_group_size must be one of 32, 64, got 128"),
        (["--kv-group-size", "64"], "it needs kv_bits"),
    ],
)
def test_what_no_worker_can_do_is_refused_before_anything_starts(served, arguments, message):
    result, _ = served(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())

"""A model's fingerprint changes with its content and with nothing else."""

import shutil
from pathlib import Path

import pytest

from cluster.config import bundled_model, default_model_name
from cluster.errors import StartupFailed
from cluster.model_files import check_model, find_model, model_digest, read_json, tokenizer_digest


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(bundled_model(), tmp_path / "copy"))


def test_a_copy_has_the_same_fingerprints(folder):
    original = Path(bundled_model())
    assert model_digest(folder) == model_digest(original)
    assert tokenizer_digest(folder) == tokenizer_digest(original)


@pytest.mark.parametrize("at", [10, -10])
def test_other_weights_have_another_fingerprint(folder, at):
    weights = folder / "model.safetensors"
    before = model_digest(folder)
    data = bytearray(weights.read_bytes())
    data[at] ^= 1
    weights.write_bytes(data)
    assert model_digest(folder) != before


def test_another_chat_template_has_another_fingerprint(folder):
    before = tokenizer_digest(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(folder) != before


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(StartupFailed, match=r"holds no config\.json"):
        find_model(str(tmp_path))


def test_an_unreachable_hub_id_is_refused_by_name():
    with pytest.raises(StartupFailed, match="'nobody/nothing' is no folder"):
        find_model("nobody/nothing")


def test_json_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(StartupFailed, match="expected a JSON object, got list"):
        read_json(tmp_path / "x.json")


def test_clients_call_a_model_by_its_folder_or_hub_id(tmp_path):
    assert default_model_name(str(tmp_path / "..")) == tmp_path.parent.name
    assert default_model_name("someone/some-model") == "someone/some-model"


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


BROKEN = {
    "config.json: is no JSON": lambda folder: cut(folder / "config.json", 30),
    "config.json: expected a JSON object, got list": lambda folder: (folder / "config.json").write_text("[]"),
    "config.json: names no model_type": lambda folder: (folder / "config.json").write_text("{}"),
    "holds no weights": lambda folder: (folder / "model.safetensors").unlink(),
    r"model.safetensors: is cut off: \d+ bytes, its header tells of": lambda folder: cut(
        folder / "model.safetensors", 1_000_000
    ),
    r"model.safetensors: is cut off or no safetensors file \(100 bytes\)": lambda folder: cut(
        folder / "model.safetensors", 100
    ),
    r"model.safetensors: is cut off or no safetensors file \(0 bytes\)": lambda folder: cut(
        folder / "model.safetensors", 0
    ),
    "its header can't be read": lambda folder: (folder / "model.safetensors").write_bytes(
        (2).to_bytes(8, "little") + b"[]" + bytes(10)
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_folder_is_told_with_the_file(folder, message):
    check_model(folder)
    BROKEN[message](folder)
    with pytest.raises(StartupFailed, match=message):
        check_model(folder)

"""A model's files on this machine: where they are and a fingerprint of their content."""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cluster.errors import StartupFailed
from cluster.scheduling.request import Pooling

_SAMPLE_BYTES = 64 * 1024
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "vocab.json")


def find_model(path_or_hub_id: str) -> Path:
    """The folder itself, or the local copy of a hub repository, downloaded when it is not there yet.

    Raises StartupFailed when there is neither such a folder nor such a repository within reach.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise StartupFailed(f"model: {folder} holds no config.json, so it is not a model that mlx-lm can load")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path_or_hub_id))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartupFailed(
            f"model: {path_or_hub_id!r} is no folder on this machine and could not be fetched from the hub: {error}"
        ) from error


def check_model(folder: Path) -> None:
    """Look at what costs nothing to look at, before anything is started. O(files).

    Raises StartupFailed for a config that is no JSON or names no model type, and for weights that are absent or cut
    off. Whether the model can be run is the worker's to say.
    """
    path = folder / "config.json"
    if not isinstance(read_json(path).get("model_type"), str):
        raise StartupFailed(f"{path}: names no model_type, so it is not a model that mlx-lm can load")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupFailed(f"{folder} holds no weights (*.safetensors)")
    for file in files:
        _check_weights(file)


def _check_weights(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_size = int.from_bytes(start, "little")
        if len(start) < 8 or header_size > size - 8:
            raise StartupFailed(f"{path}: is cut off or no safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(header_size))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise StartupFailed(f"{path}: is no safetensors file: its header can't be read ({error!r})") from error
    needed = 8 + header_size + max(ends, default=0)
    if size < needed:
        raise StartupFailed(f"{path}: is cut off: {size} bytes, its header tells of {needed}")


def model_digest(folder: Path) -> str:
    """Fingerprint of configuration and weights.

    Reads config.json whole and of each weights file its size and three samples: seconds matter more at a start with
    30 GB of weights than telling apart two files that differ only elsewhere.
    """
    digest = blake2b(digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """Fingerprint of everything that turns text into tokens, the chat template included."""
    digest = blake2b(digest_size=16)
    for name in _TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            digest.update(f"{name}:{path.stat().st_size};".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def pooling_of(folder: Path) -> Pooling:
    """How the model was made to stand for a text, as sentence-transformers writes it down; else by its last token."""
    config = read_json(folder / "1_Pooling" / "config.json")
    if config.get("pooling_mode_mean_tokens"):
        return Pooling.MEAN
    return Pooling.CLS if config.get("pooling_mode_cls_token") else Pooling.LAST


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise StartupFailed(f"{path}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupFailed(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value

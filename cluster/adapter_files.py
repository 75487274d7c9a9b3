"""An adapter's files on this machine, as far as the cluster must know them: that they are there, and their digest.

What is in them is the worker's to check.
"""

import json
from hashlib import blake2b
from pathlib import Path

from cluster.errors import InvalidRequest

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"
_CHUNK_BYTES = 1 << 20


def find_adapter(path: str) -> Path:
    """The folder. Raises InvalidRequest if it, or one of its files, is not on this machine."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InvalidRequest("path", f"{path!r} is no folder on this machine")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise InvalidRequest("path", f"{folder} has no {name}, so it is no adapter that mlx-lm has made")
    return folder


def adapter_digest(folder: Path) -> str:
    """Of all that changes what it does: kind, rank, scale and every byte of its weights. A GiB takes a second or two.

    Raises InvalidRequest for a configuration that is not a JSON object.
    """
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except ValueError as error:
        raise InvalidRequest("path", f"{folder / CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest("path", f"{folder / CONFIG_FILE} must hold an object, got {type(config).__name__}")
    what = {name: config.get(name) for name in ("fine_tune_type", "lora_parameters")}
    digest = blake2b(digest_size=16, person=b"cidery-adapter")
    digest.update(json.dumps(what, sort_keys=True).encode() + b"\n")
    with (folder / WEIGHTS_FILE).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def adapter_bytes(folder: Path) -> int:
    """What its weights take, in the file and in memory."""
    return (folder / WEIGHTS_FILE).stat().st_size

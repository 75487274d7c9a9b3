"""How long the matrix products of a model take alone: no server on this machine can be faster than that.

    python -m tests.bench.serve_products FOLDER 16

Prints one JSON line. Every weight matrix is multiplied once a pass, in the model's order, so that it comes from memory
as it does in a server: with the rows of a large prefill step, and with a row for each client. The rest of a model
(attention, norms, activations) is left out.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_PREFILL_ROWS = 512
_NUM_PASSES = 5


def least_wall_s(
    folder: Path, clients: int, num_prompt_tokens: float, num_output_tokens: float, environment: dict[str, str]
) -> float:
    """Seconds of products for so many tokens, batched as well as can be.

    Prompts go in full steps; answers need a step a token, `clients` rows each, and ride along with the prompts' steps.
    """
    command = [sys.executable, "-m", "tests.bench.serve_products", str(folder), str(clients)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=300
    )
    timed = json.loads(done.stdout)
    num_prefills = num_prompt_tokens / _PREFILL_ROWS
    num_decodes = max(0.0, num_output_tokens / clients - num_prefills)
    least_s: float = num_prefills * timed["prefill_s"] + num_decodes * timed["decode_s"]
    return least_s


def main() -> None:
    """Time both steps."""
    import mlx.core as mx

    mx.set_default_device(mx.Device(mx.DeviceType.cpu))
    weights = mx.load(sys.argv[1] + "/model.safetensors")
    assert isinstance(weights, dict)
    matrices = [array for name, array in weights.items() if array.ndim == 2 and "embed_tokens" not in name]
    mx.eval(matrices)

    def fastest_s(num_rows: int, those: list[mx.array]) -> float:
        inputs = {width: mx.random.normal((num_rows, width)) for width in {each.shape[1] for each in those}}
        mx.eval(list(inputs.values()))
        times = []
        for _ in range(_NUM_PASSES):
            started_s = time.perf_counter()
            mx.eval([inputs[each.shape[1]] @ each.T for each in those])
            times.append(time.perf_counter() - started_s)
        return min(times)

    # A prompt asks for the vocabulary's row at its end only.
    layers = [array for name, array in weights.items() if array.ndim == 2 and name.startswith("model.layers")]
    decode_s = fastest_s(int(sys.argv[2]), matrices)
    sys.stdout.write(json.dumps({"prefill_s": fastest_s(_PREFILL_ROWS, layers), "decode_s": decode_s}) + "\n")


if __name__ == "__main__":
    main()

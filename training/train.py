"""Train the bundled model on one CPU core: `python -m training.train --steps N --out FOLDER`.

Owns the training loop and its checkpoints. Each batch holds whole conversations of about the same
length, each in a row of its own from position 0, so no conversation sees another.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import cast

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_unflatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from training.data import stream
from training.mixture import EARLY, LATE, Mixture
from training.model import build_model, count_parameters, named_arrays, save_model
from training.tokenizer import SPECIAL_TOKENS, Encoder, save_tokenizer, token_id, train_tokenizer

POOL_CONVERSATIONS = 512  # sorted by length together: wide enough that padding is 1.4 %
MAX_TOKENS = 512
WARMUP_STEPS = 100
DECAY_SHARE = 0.4  # the last part of the run, in which the learning rate falls to zero
CHECKPOINT_EVERY_S = 180.0
Row = tuple[list[int], list[bool]]
Gradient = Callable[[qwen3.Model, "Batch"], tuple[tuple[mx.array, mx.array], dict[str, object]]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right.

    *Shapes*: inputs `[rows, length]`; positions and targets `[num_answer_tokens]`, where positions
    index the flattened inputs.
    """

    inputs: mx.array
    positions: mx.array
    targets: mx.array


@dataclass(slots=True)
class Progress:
    """Where a run stands; written into every checkpoint."""

    step: int = 0
    pool: int = 0
    elapsed_s: float = 0.0
    num_tokens: int = 0


def make_batch(rows: Sequence[Row]) -> Batch:
    """Shift by one and collect the places where an answer token comes next."""
    length = max(len(ids) for ids, _ in rows) - 1
    inputs = np.zeros((len(rows), length), np.int32)
    positions: list[int] = []
    targets: list[int] = []
    for at, (ids, is_answer) in enumerate(rows):
        inputs[at, : len(ids) - 1] = ids[:-1]
        wanted = [place for place in range(1, len(ids)) if is_answer[place]]
        positions += [at * length + place - 1 for place in wanted]
        targets += [ids[place] for place in wanted]
    return Batch(mx.array(inputs), mx.array(positions), mx.array(targets))


def pool_batches(encoder: Encoder, pool_seed: int, mixture: Mixture, batch_tokens: int) -> Iterator[Batch]:
    """Yield the batches of one pool; seed and mixture alone decide what they hold."""
    rows = encoder.encode_all(list(islice(stream(pool_seed, mixture), POOL_CONVERSATIONS)))
    rows = sorted((row for row in rows if len(row[0]) <= MAX_TOKENS), key=lambda row: len(row[0]))
    groups: list[list[Row]] = [[]]
    for row in rows:
        if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(row)
    Random(pool_seed).shuffle(groups)
    yield from map(make_batch, groups)


def loss_fn(model: qwen3.Model, batch: Batch) -> tuple[mx.array, mx.array]:
    """Give a stand-in whose gradient is that of the cross-entropy, and the cross-entropy itself.

    The stand-in costs one exponential per logit instead of three (exponentials are slow on a
    CPU); logits are computed for answer tokens only.
    """
    hidden = model.model(batch.inputs)
    hidden = hidden.reshape(-1, hidden.shape[-1])[batch.positions]
    logits = model.model.embed_tokens.as_linear(hidden)
    targets = batch.targets[:, None]
    probs = mx.stop_gradient(mx.softmax(logits, axis=-1))
    stand_in = (probs * logits).sum() - mx.take_along_axis(logits, targets, axis=-1).sum()
    picked = mx.take_along_axis(probs, targets, axis=-1)
    return stand_in / targets.size, -mx.log(picked + 1e-9).mean()


def make_optimizer() -> optim.MultiOptimizer:
    """Muon for the matrices inside the layers, Adam for embedding and norms.

    Source: Muon is Keller Jordan's.
    """

    def is_matrix(path: str, weight: mx.array) -> bool:
        return path.endswith("proj.weight") and weight.ndim == 2

    muon = optim.Muon(learning_rate=0.0, momentum=0.95, weight_decay=0.0)
    adam = optim.Adam(learning_rate=0.0, betas=[0.9, 0.98], bias_correction=True)
    return optim.MultiOptimizer([muon, adam], [is_matrix])


def rate_factor(step: int, done: float) -> float:
    """Give the share of the peak learning rate: warm up, stay, then fall linearly to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (1.0 - done) / DECAY_SHARE)


class Trainer:
    """Owns the model, the optimizer and the progress of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Make fresh weights, or take those of the checkpoint to resume."""
        self._options = options
        self._out: Path = options.out
        mx.random.seed(options.seed)
        self._tokenizer = self._load_tokenizer()
        self._encoder = Encoder(self._tokenizer)
        self.model = build_model()
        self._optimizer = make_optimizer()
        self._optimizer.init(self.model.trainable_parameters())
        self.progress = Progress()
        self._start_s = time.monotonic()
        if options.resume is not None:
            self._load_checkpoint(options.resume)

    def run(self) -> None:
        """Train until the step or the time budget is used up, then save the model."""
        say(f"parameters {count_parameters(self.model)}")
        self._start_s = time.monotonic() - self.progress.elapsed_s
        gradient: Gradient = value_and_grad(self.model, loss_fn)
        saved_s, average = self.progress.elapsed_s, math.nan
        while self._done() < 1.0:
            for batch in self._next_pool():
                if self._done() >= 1.0:
                    break
                value = self._step(gradient, batch)
                average = value if math.isnan(average) else 0.98 * average + 0.02 * value
                if self.progress.step % 50 == 0:
                    self._report(average)
            self.progress.pool += 1
            if self.progress.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
                saved_s = self.progress.elapsed_s
                self.save_checkpoint()
        self._report(average)
        self.save_checkpoint()

    def _next_pool(self) -> Iterator[Batch]:
        """Take the next pool, from the late mixture once the learning rate falls."""
        mixture = EARLY if self._done() < 1.0 - DECAY_SHARE else LATE
        pool_seed = self._options.seed * 1_000_003 + self.progress.pool
        return pool_batches(self._encoder, pool_seed, mixture, self._options.batch_tokens)

    def _step(self, gradient: Gradient, batch: Batch) -> float:
        factor = rate_factor(self.progress.step, self._done())
        muon, adam = self._optimizer.optimizers
        muon.learning_rate = self._options.rate * factor
        adam.learning_rate = self._options.embedding_rate * factor
        (_, loss), grads = gradient(self.model, batch)
        grads, _ = optim.clip_grad_norm(grads, 1.0)  # type: ignore[no-untyped-call]
        self._optimizer.update(self.model, grads)
        mx.eval(self.model.parameters(), self._optimizer.state, loss)
        self.progress.step += 1
        self.progress.num_tokens += batch.inputs.size
        self.progress.elapsed_s = time.monotonic() - self._start_s
        return cast(float, loss.item())

    def _done(self) -> float:
        """Give the used share of whichever budget, steps or seconds, is further used up."""
        shares = [0.0]
        if self._options.steps is not None:
            shares.append(self.progress.step / self._options.steps)
        if self._options.seconds is not None:
            shares.append(self.progress.elapsed_s / self._options.seconds)
        return min(1.0, max(shares))

    def _report(self, average: float) -> None:
        done, found = self._done(), self.progress
        bar = "#" * int(20 * done)
        speed = found.num_tokens / max(found.elapsed_s, 1e-9)
        say(
            f"[{bar:<20}] {done:4.0%} step {found.step} loss {average:.4f} {found.elapsed_s:.0f} s {speed:.0f} tokens/s"
        )

    def _load_tokenizer(self) -> Tokenizer:
        path = self._out / "tokenizer.json"
        if not path.exists():
            save_tokenizer(train_tokenizer(self._options.seed), self._out)
        return Tokenizer.from_file(str(path))

    def save_checkpoint(self) -> None:
        """Write the model folder, and beside it what a later run needs to go on."""
        ids = {token: token_id(self._tokenizer, token) for token in SPECIAL_TOKENS}
        save_model(self.model, self._out, ids)
        folder: Path = self._options.checkpoints
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{self.progress.step}.safetensors"
        arrays = {f"model.{k}": v for k, v in named_arrays(self.model.parameters()).items()}
        arrays |= {f"state.{k}": v for k, v in named_arrays(self._optimizer.state).items()}
        mx.save_safetensors(str(path), arrays, {"progress": json.dumps(asdict(self.progress))})
        say(f"saved {path}")

    def _load_checkpoint(self, path: Path) -> None:
        arrays, metadata = cast(tuple[dict[str, mx.array], dict[str, str]], mx.load(str(path), return_metadata=True))
        parts: dict[str, list[tuple[str, mx.array]]] = {"model": [], "state": []}
        for name, value in arrays.items():
            part, _, rest = name.partition(".")
            parts[part].append((rest, value))
        self.model.load_weights(parts["model"])
        self._optimizer.state = tree_unflatten(parts["state"])
        self.progress = Progress(**json.loads(metadata["progress"]))


def say(text: str) -> None:
    """Write one line at once, also into a file."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", type=Path, help="a checkpoint; its steps and seconds count")
    parser.add_argument("--steps", type=int, help="budget in steps: repeatable")
    parser.add_argument("--seconds", type=float, help="budget in seconds: not repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.02, help="peak rate of Muon")
    parser.add_argument("--embedding-rate", type=float, default=0.005, help="peak rate of Adam")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    options = parser.parse_args()
    if options.steps is None and options.seconds is None:
        parser.error("give --steps or --seconds")
    return options


def main() -> None:
    """Run the training."""
    mx.set_default_device(mx.cpu)
    Trainer(parse_options()).run()


if __name__ == "__main__":
    main()

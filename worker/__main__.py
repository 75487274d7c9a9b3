"""`python -m worker`: serve the manager on a Unix socket, or answer one prompt alone."""

import argparse
import gc
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from worker import blas, switches
from worker.config import DTYPES, WorkerConfig

if TYPE_CHECKING:
    from worker.draft import DraftModel
    from worker.engine import Engine

# MLX is imported inside functions only: the BLAS must be there first.
logger = logging.getLogger("worker")

# How long a step may still run after the end was asked for; then the process goes as it is.
_GRACE_S = 10.0


def main() -> int:
    """Run the process; returns its exit status."""
    config = _parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    blas.load(num_threads=None)
    if sys.platform == "darwin":
        # MLX commits its command buffer when the buffers named in it exceed this; a KV pool would at every layer.
        os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "1000000")
    return _answer(config) if config.prompt is not None else _serve(config)


def _parse() -> WorkerConfig:
    parser = argparse.ArgumentParser(prog="worker", description=__doc__)
    parser.add_argument("--model", required=True, help="directory or hub id of an mlx-lm model")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--socket", dest="socket_path", help="serve the manager on this Unix socket")
    mode.add_argument("--prompt", help="answer this prompt and end; no cluster needed")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="type of weights and KV")
    parser.add_argument("--kv-bits", type=int, choices=(4, 8), help="quantise keys and values to so many bits")
    parser.add_argument("--kv-group-size", type=int, choices=(32, 64), help="elements that share a scale")
    parser.add_argument("--block-size", type=int, default=16, choices=(16, 32), help="tokens of a block of KV")
    parser.add_argument("--max-num-seqs", type=int, help="sequences of the largest step, which is measured if given")
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens of the largest step")
    parser.add_argument("--max-model-len", type=int, help="the longest context that will be asked for")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answer to --prompt; 0 is greedy")
    parser.add_argument("--max-tokens", type=int, default=256, help="upper bound of the answer to --prompt")
    parser.add_argument("--num-speculative-tokens", type=int, default=0, help="tokens that a sequence may guess a step")
    parser.add_argument("--draft-model", help="directory or hub id of a smaller model that guesses too")
    parser.add_argument(
        "--exit-with-stdin", dest="exits_with_stdin", action="store_true", help="end when standard input does"
    )
    config = WorkerConfig(**vars(parser.parse_args()))
    switches.check_all(parser)
    return config


def _serve(config: WorkerConfig) -> int:
    from worker.dry_run import StepLimits, activation_bytes
    from worker.server import listen, serve

    if config.socket_path is None:
        raise ValueError("socket_path is needed to serve")
    started_s = time.monotonic()
    signal.signal(signal.SIGTERM, _raise_terminated)
    if config.exits_with_stdin:
        threading.Thread(target=_watch_stdin, name="stdin", daemon=True).start()
    try:
        engine = _build_engine(config)
        if config.max_num_seqs is not None and config.max_num_batched_tokens is not None:
            limits = StepLimits(
                config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size
            )
            engine.activation_bytes = activation_bytes(engine, limits)
        # What is loaded stays: a collection that walks it all would stall a step.
        gc.collect()
        gc.freeze()
        description = engine.describe()
        listener = listen(config.socket_path)
        logger.info(
            "ready model=%s socket=%s device=%s kernels=%s weights_mib=%.1f load_s=%.1f",
            config.model,
            config.socket_path,
            description.device,
            description.kernels,
            description.weights_bytes / 2**20,
            time.monotonic() - started_s,
        )
        serve(listener, engine)
    except Terminated:
        logger.info("stopping: terminated, or the parent is gone")
    return 0


class Terminated(BaseException):
    """The process was asked to end; not an error, so that nothing on the way takes it for one."""


def _raise_terminated(number: int, frame: object) -> None:
    raise Terminated


def _answer(config: WorkerConfig) -> int:
    from mlx_lm.utils import load_tokenizer

    from protos.cidery.v1.sampling_pb2 import SamplingParams
    from worker import standalone
    from worker.models import download

    if config.prompt is None:
        raise ValueError("prompt is needed to answer it")
    engine = _build_engine(config)
    tokenizer = load_tokenizer(download(config.model))  # type: ignore[no-untyped-call]
    prompt = standalone.encode(tokenizer, config.prompt)
    answer = standalone.answer(
        engine, prompt, max_tokens=config.max_tokens, sampling=SamplingParams(temperature=config.temperature)
    )
    sys.stdout.write(tokenizer.decode(answer.token_ids) + "\n")
    sys.stderr.write(f"{answer}\n")
    return 0


def _build_engine(config: WorkerConfig) -> "Engine":
    from worker import kv_quantization, machine, models, trial
    from worker.engine import Engine
    from worker.grammar import GrammarTable
    from worker.kernel_needs import needs_of
    from worker.metal.decode_checks import VerifyNeeds
    from worker.metal.dispatch import choose_kernels, has_metal, twin_kernels
    from worker.speculation import Speculation

    machine.prepare()
    memory_limit_bytes = machine.memory_limit_bytes()
    plain = models.load(config.model, dtype=config.dtype)
    if plain.unreviewed:
        # Not quantised, as what it is held against.
        trial.verify(Engine(plain, twin_kernels(), memory_limit_bytes=memory_limit_bytes), plain)
    loaded = kv_quantization.quantise(plain, config.kv_bits, config.kv_group_size)
    grammars = None
    if loaded.eos_token_ids:
        grammars = GrammarTable(models.download(config.model), loaded.vocab_size, loaded.eos_token_ids)
    needs = needs_of(loaded, config.block_size) if has_metal() else []
    if needs and config.num_speculative_tokens:
        needs.append(VerifyNeeds(1 + config.num_speculative_tokens))
    kernels = choose_kernels(needs)
    return Engine(
        loaded,
        kernels,
        memory_limit_bytes=memory_limit_bytes,
        grammars=grammars,
        speculation=Speculation(
            max_drafts=config.num_speculative_tokens,
            has_states=loaded.has_states,
            draft=_build_draft(config, loaded.vocab_size),
        ),
    )


def _build_draft(config: WorkerConfig, vocab_size: int) -> "DraftModel | None":
    from worker import draft, machine, models
    from worker.kernel_needs import needs_of
    from worker.metal.dispatch import choose_kernels, has_metal

    if config.draft_model is None:
        return None
    draft.check_tokens(models.download(config.model), models.download(config.draft_model))
    loaded = models.load(config.draft_model, dtype=config.dtype)
    kv_bytes = min(draft.MAX_KV_BYTES, machine.memory_limit_bytes() // draft.KV_SHARE)
    kernels = choose_kernels(needs_of(loaded, draft.BLOCK_SIZE) if has_metal() else ())
    return draft.DraftModel(loaded, kernels, vocab_size=vocab_size, kv_bytes=kv_bytes)


def _watch_stdin() -> None:
    """Ask the main thread to end once the parent is gone, and do not wait for it forever."""
    # Not sys.stdin: its lock, held while waiting, would abort the interpreter's shutdown.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

"""The worker as a process: a real Unix socket, real plans, real ends."""

import json
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from cluster.kv.hashing import hash_blocks
from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb
from protos.cidery.worker.v1 import worker_pb2_grpc
from tests.worker.driver import ROOT
from tests.worker.families import config_of, make_model
from worker.server import Failure, Inbox, Opened, Received, Stop, Stream, Worker

_WAIT_S = 60
_EOS = 7


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = make_model("qwen3")
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps({**config_of("qwen3"), "eos_token_id": [_EOS]}))
    return path


class WorkerProcess:
    def __init__(self, model_dir: Path, socket: Path) -> None:
        arguments = ["--model", str(model_dir), "--socket", str(socket), "--exit-with-stdin"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "worker", *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.channel = grpc.insecure_channel(f"unix:{socket}")
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.description = self.stub.Describe(pb.DescribeRequest(), wait_for_ready=True, timeout=_WAIT_S)

    def close(self) -> str:
        """Ends it like a dead parent would; what it logged."""
        self.channel.close()
        _, log = self.process.communicate(timeout=_WAIT_S)
        return log


@pytest.fixture(scope="module")
def shared_worker(model_dir, tmp_path_factory):
    worker = WorkerProcess(model_dir, tmp_path_factory.mktemp("socket") / "w")
    yield worker
    # Refused, cancelled and broken streams are all in a day's work.
    assert "Traceback" not in worker.close()


class RunStream:
    """A Run call whose requests are pushed one by one."""

    def __init__(self, stub, *, block_size=16, num_blocks=64) -> None:
        self.requests: queue.SimpleQueue[pb.RunRequest | None] = queue.SimpleQueue()
        self.responses = stub.Run(iter(self.requests.get, None), timeout=_WAIT_S)
        configure = pb.Configure(block_size=block_size, num_blocks=num_blocks, root_hash=ROOT)
        self.requests.put(pb.RunRequest(configure=configure))

    def configured(self) -> pb.Configured:
        return next(self.responses).configured

    def send(self, plan: pb.StepPlan) -> None:
        self.requests.put(pb.RunRequest(plan=plan))

    def result(self) -> pb.StepResult:
        return next(self.responses).result

    def close(self) -> None:
        self.requests.put(None)
        assert list(self.responses) == []


def _first_plan(prompt, *, blocks=(1, 2, 3), stop_token_ids=(), seq_id=1) -> pb.StepPlan:
    sequence = pb.NewSequence(
        seq_id=seq_id, token_ids=prompt, sampling=SamplingParams(temperature=0.0), stop_token_ids=stop_token_ids
    )
    piece = pb.Slice(seq_id=seq_id, num_tokens=len(prompt), samples=True, new_blocks=[pb.GroupBlocks(block_ids=blocks)])
    return pb.StepPlan(step_id=1, new_sequences=[sequence], slices=[piece])


def _decode_plan(step_id: int, position: int, seq_id=1) -> pb.StepPlan:
    piece = pb.Slice(seq_id=seq_id, start=position, num_tokens=1, samples=True)
    return pb.StepPlan(step_id=step_id, slices=[piece])


def _greedy(stub, prompt, num_tokens) -> list[int]:
    stream = RunStream(stub)
    stream.configured()
    stream.send(_first_plan(prompt))
    tokens = [stream.result().sampled[0].token_id]
    while len(tokens) < num_tokens:
        stream.send(_decode_plan(1 + len(tokens), len(prompt) + len(tokens) - 1))
        tokens.append(stream.result().sampled[0].token_id)
    stream.close()
    return tokens


def test_describe_tells_what_the_manager_plans_with(shared_worker):
    """Layers in cache order, vocabulary, context, end tokens, bytes."""
    description = shared_worker.description
    assert [(layer.kind, layer.num_kv_heads, layer.head_dim, layer.dtype) for layer in description.layers] == [
        (pb.LAYER_KIND_FULL_ATTENTION, 2, 16, "float32")
    ] * 3
    assert description.vocab_size == config_of("qwen3")["vocab_size"]
    assert description.max_model_len == 512
    assert list(description.eos_token_ids) == [_EOS]
    assert description.weights_bytes > 0
    assert description.memory_limit_bytes > description.weights_bytes
    assert description.pid == shared_worker.process.pid


def test_plans_sent_one_step_ahead_use_the_token_just_sampled(shared_worker):
    """A plan may name a position whose token no result has told yet."""
    prompt = list(range(20, 40))
    expected = _greedy(shared_worker.stub, prompt, 10)
    stream = RunStream(shared_worker.stub)
    # 3 layers, K and V, 2 heads of 16 floats, 64 blocks of 16.
    assert stream.configured().kv_bytes == 3 * 2 * 2 * 16 * 4 * 64 * 16
    stream.send(_first_plan(prompt))
    for ahead in range(1, 10):
        stream.send(_decode_plan(1 + ahead, len(prompt) + ahead - 1))
    results = [stream.result() for _ in range(10)]
    assert [result.step_id for result in results] == list(range(1, 11))
    assert [result.sampled[0].token_id for result in results] == expected
    filled = [block.block_hash for result in results for block in result.filled_blocks]
    assert filled == hash_blocks(ROOT, prompt + expected[:-1], 16)
    stream.close()


def test_slices_sent_before_the_stop_was_known_are_skipped(shared_worker):
    """The worker skips rows that it saw stop, and says so."""
    prompt = list(range(50, 70))
    tokens = _greedy(shared_worker.stub, prompt, 12)
    stop = next(token for token in tokens[1:] if token not in tokens[:1])
    stops_at = tokens.index(stop)
    stream = RunStream(shared_worker.stub)
    stream.configured()
    stream.send(_first_plan(prompt, stop_token_ids=[stop]))
    for ahead in range(1, 12):
        stream.send(_decode_plan(1 + ahead, len(prompt) + ahead - 1))
    results = [stream.result() for _ in range(12)]
    sampled = [token for result in results for token in result.sampled]
    assert [token.token_id for token in sampled] == tokens[: stops_at + 1]
    assert [token.stopped for token in sampled] == [False] * stops_at + [True]
    assert [list(result.skipped_seq_ids) for result in results[stops_at + 1 :]] == [[1]] * (11 - stops_at)
    stream.close()


def test_second_stream_is_refused_while_one_runs(shared_worker):
    first = RunStream(shared_worker.stub)
    first.configured()
    second = RunStream(shared_worker.stub)
    with pytest.raises(grpc.RpcError) as refusal:
        second.configured()
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    second.requests.put(None)
    first.send(_first_plan([1, 2, 3]))
    assert first.result().sampled
    first.close()


def test_stream_after_a_cancelled_one_starts_empty(shared_worker):
    """The end of a stream, however it comes, drops sequences and pools."""
    stream = RunStream(shared_worker.stub)
    stream.configured()
    stream.send(_first_plan([1, 2, 3]))
    stream.result()
    stream.responses.cancel()
    stream.requests.put(None)
    again = RunStream(shared_worker.stub)
    again.configured()
    again.send(_first_plan([1, 2, 3]))
    assert again.result().sampled
    again.close()


def test_violation_ends_the_stream_and_the_worker_lives_on(shared_worker):
    """INVALID_ARGUMENT that says what was wrong; the next stream works."""
    stream = RunStream(shared_worker.stub)
    stream.configured()
    stream.send(_decode_plan(1, 0, seq_id=99))
    with pytest.raises(grpc.RpcError) as violation:
        stream.result()
    assert violation.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sequence 99" in violation.value.details()
    stream.requests.put(None)
    assert _greedy(shared_worker.stub, [1, 2, 3], 2)


class FailingEngine:
    """An engine whose steps break."""

    def __init__(self) -> None:
        self.num_resets = 0

    def configure(self, message: pb.Configure) -> pb.Configured:
        return pb.Configured()

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        raise RuntimeError("out of memory")

    def reset(self) -> None:
        self.num_resets += 1


class OpenContext:
    def is_active(self) -> bool:
        return True


def test_failing_step_ends_the_stream_with_internal_and_a_traceback(caplog):
    """Never silently; and nothing that the stream sent afterwards is executed."""
    inbox, engine, stream = Inbox(), FailingEngine(), Stream(OpenContext())
    inbox.put(Opened(stream))
    inbox.put(Received(stream, pb.RunRequest(configure=pb.Configure())))
    for _ in range(3):
        inbox.put(Received(stream, pb.RunRequest(plan=pb.StepPlan())))
    inbox.put(Stop("done"))
    assert Worker(engine, inbox).run() == "done"
    assert stream.outbox.get() == pb.RunResponse(configured=pb.Configured())
    assert stream.outbox.get() == Failure(grpc.StatusCode.INTERNAL, "RuntimeError: out of memory")
    assert stream.outbox.empty()
    assert engine.num_resets == 1
    assert "Traceback" in caplog.text


def test_every_open_call_ends_with_the_worker():
    """A thread that waits for the next result would keep the process from ending."""
    inbox, engine = Inbox(), FailingEngine()
    served, late = Stream(OpenContext()), Stream(OpenContext())
    for event in (Opened(served), Stop("done"), Opened(late)):
        inbox.put(event)
    assert Worker(engine, inbox).run() == "done"
    assert served.outbox.get(timeout=1) is None
    assert late.outbox.get(timeout=1) is None


def test_worker_ends_when_its_parent_dies(model_dir, tmp_path):
    """Standard input closes with the parent, in the middle of a stream too."""
    worker = WorkerProcess(model_dir, tmp_path / "w")
    stream = RunStream(worker.stub)
    stream.configured()
    log = worker.close()
    assert worker.process.returncode == 0
    assert "parent is gone" in log
    stream.requests.put(None)


def test_worker_ends_on_sigterm(model_dir, tmp_path):
    worker = WorkerProcess(model_dir, tmp_path / "w")
    worker.process.send_signal(signal.SIGTERM)
    started_s = time.monotonic()
    assert worker.process.wait(_WAIT_S) == 0
    assert time.monotonic() - started_s < _WAIT_S / 4
    worker.close()


def test_prompt_alone_is_answered_without_a_cluster(model_dir, tmp_path):
    """The debugging mode runs the same engine."""
    tokenizer = pytest.importorskip("tokenizers")
    words = tokenizer.models.WordLevel({str(i): i for i in range(320)}, unk_token="0")
    made = tokenizer.Tokenizer(words)
    made.pre_tokenizer = tokenizer.pre_tokenizers.Whitespace()
    made.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    command = [sys.executable, "-m", "worker", "--model", str(model_dir), "--prompt", "20 21 22", "--max-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=True)
    assert len(done.stdout.split()) <= 4
    assert "tokens/s" in done.stderr

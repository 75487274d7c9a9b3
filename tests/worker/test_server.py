"""The worker as a process: a real Unix socket, real plans, real ends."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from cluster.kv.hashing import hash_blocks
from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.worker.driver import ROOT
from tests.worker.families import config_of, make_model
from worker.server import Connection, serve_connection

_WAIT_S = 60
_EOS = 7


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = make_model("qwen3")
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps({**config_of("qwen3"), "eos_token_id": [_EOS]}))
    return path


class Manager:
    """The other end of the socket, in its simplest form."""

    def __init__(self, socket_path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(_WAIT_S)
        give_up_s = time.monotonic() + _WAIT_S
        while True:
            try:
                self.socket.connect(str(socket_path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < give_up_s
                time.sleep(0.02)
        self.reader = self.socket.makefile("rb")
        self.description = self.receive().description

    def send(self, **fields) -> None:
        data = pb.ManagerMessage(**fields).SerializeToString()
        self.socket.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> pb.WorkerMessage | None:
        head = self.reader.read(4)
        return pb.WorkerMessage.FromString(self.reader.read(struct.unpack("<I", head)[0])) if head else None

    def configure(self, *, block_size=16, num_blocks=64) -> pb.Configured:
        groups = [pb.Group(layers=range(len(self.description.layers)))]
        self.send(configure=pb.Configure(block_size=block_size, num_blocks=[num_blocks], root_hash=ROOT, groups=groups))
        return self.receive().configured

    def result(self) -> pb.StepResult:
        message = self.receive()
        assert message.HasField("result"), message
        return message.result

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


class WorkerProcess:
    def __init__(self, model_dir: Path, socket_path: Path) -> None:
        arguments = ["--model", str(model_dir), "--socket", str(socket_path), "--exit-with-stdin"]
        self.socket_path = socket_path
        self.process = subprocess.Popen(
            [sys.executable, "-m", "worker", *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @contextlib.contextmanager
    def manager(self):
        manager = Manager(self.socket_path)
        try:
            yield manager
        finally:
            manager.close()

    def close(self) -> str:
        """Ends it like a dead parent would; what it logged."""
        _, log = self.process.communicate(timeout=_WAIT_S)
        return log


@pytest.fixture(scope="module")
def shared_worker(model_dir, tmp_path_factory):
    worker = WorkerProcess(model_dir, tmp_path_factory.mktemp("socket") / "w")
    yield worker
    # Violations and broken connections are all in a day's work.
    assert "Traceback" not in worker.close()


def _first_plan(prompt, *, blocks=(1, 2, 3), stop_token_ids=(), seq_id=1) -> pb.StepPlan:
    sequence = pb.NewSequence(
        seq_id=seq_id, token_ids=prompt, sampling=SamplingParams(temperature=0.0), stop_token_ids=stop_token_ids
    )
    piece = pb.Slice(seq_id=seq_id, num_tokens=len(prompt), samples=True, new_blocks=[pb.GroupBlocks(block_ids=blocks)])
    return pb.StepPlan(step_id=1, new_sequences=[sequence], slices=[piece])


def _decode_plan(step_id: int, position: int, seq_id=1) -> pb.StepPlan:
    piece = pb.Slice(seq_id=seq_id, start=position, num_tokens=1, samples=True)
    return pb.StepPlan(step_id=step_id, slices=[piece])


def _greedy(worker, prompt, num_tokens) -> list[int]:
    with worker.manager() as manager:
        manager.configure()
        manager.send(plan=_first_plan(prompt))
        tokens = [manager.result().sampled[0].token_id]
        while len(tokens) < num_tokens:
            manager.send(plan=_decode_plan(1 + len(tokens), len(prompt) + len(tokens) - 1))
            tokens.append(manager.result().sampled[0].token_id)
        return tokens


def test_the_description_tells_what_the_manager_plans_with(shared_worker):
    """Layers in cache order, vocabulary, context, end tokens, bytes."""
    with shared_worker.manager() as manager:
        description = manager.description
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
    expected = _greedy(shared_worker, prompt, 10)
    with shared_worker.manager() as manager:
        # 3 layers, K and V, 2 heads of 16 floats, 64 blocks of 16.
        assert manager.configure().kv_bytes == 3 * 2 * 2 * 16 * 4 * 64 * 16
        manager.send(plan=_first_plan(prompt))
        for ahead in range(1, 10):
            manager.send(plan=_decode_plan(1 + ahead, len(prompt) + ahead - 1))
        results = [manager.result() for _ in range(10)]
    assert [result.step_id for result in results] == list(range(1, 11))
    assert [result.sampled[0].token_id for result in results] == expected
    filled = [block.block_hash for result in results for block in result.filled_blocks]
    assert filled == hash_blocks(ROOT, prompt + expected[:-1], 16)


def test_slices_sent_before_the_stop_was_known_are_skipped(shared_worker):
    """The worker skips rows that it saw stop, and says so."""
    prompt = list(range(50, 70))
    tokens = _greedy(shared_worker, prompt, 12)
    stop = next(token for token in tokens[1:] if token not in tokens[:1])
    stops_at = tokens.index(stop)
    with shared_worker.manager() as manager:
        manager.configure()
        manager.send(plan=_first_plan(prompt, stop_token_ids=[stop]))
        for ahead in range(1, 12):
            manager.send(plan=_decode_plan(1 + ahead, len(prompt) + ahead - 1))
        results = [manager.result() for _ in range(12)]
    sampled = [token for result in results for token in result.sampled]
    assert [token.token_id for token in sampled] == tokens[: stops_at + 1]
    assert [token.stopped for token in sampled] == [False] * stops_at + [True]
    assert [list(result.skipped_seq_ids) for result in results[stops_at + 1 :]] == [[1]] * (11 - stops_at)


def test_a_second_connection_waits_until_the_first_has_ended(shared_worker):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
        with shared_worker.manager() as first:
            first.configure()
            waiting.settimeout(0.3)
            waiting.connect(str(shared_worker.socket_path))
            with pytest.raises(TimeoutError):
                waiting.recv(1)
            first.send(plan=_first_plan([1, 2, 3]))
            assert first.result().sampled
        waiting.settimeout(_WAIT_S)
        assert waiting.recv(1)


@pytest.mark.parametrize(
    "sent", [b"", b"\x05\x00", b"\x05\x00\x00\x00\x12"], ids=["nothing", "half a head", "half a body"]
)
def test_a_connection_after_a_broken_one_starts_empty(shared_worker, sent):
    """The end of a connection, however it comes, drops sequences and pools."""
    with shared_worker.manager() as manager:
        manager.configure()
        manager.send(plan=_first_plan([1, 2, 3]))
        manager.result()
        manager.socket.sendall(sent)
    with shared_worker.manager() as again:
        again.configure()
        again.send(plan=_first_plan([1, 2, 3]))
        assert again.result().sampled


def test_a_violation_ends_the_connection_and_the_worker_lives_on(shared_worker):
    """The last message says what was wrong; the next connection works."""
    with shared_worker.manager() as manager:
        manager.configure()
        manager.send(plan=_decode_plan(1, 0, seq_id=99))
        failure = manager.receive().failure
        assert manager.receive() is None
    assert failure.is_protocol_error
    assert "sequence 99" in failure.message
    assert _greedy(shared_worker, [1, 2, 3], 2)


def test_an_empty_message_is_a_violation(shared_worker):
    with shared_worker.manager() as manager:
        manager.send()
        assert "an empty ManagerMessage came" in manager.receive().failure.message


class FailingEngine:
    """An engine whose steps break."""

    is_running = False

    def submit(self, plan: pb.StepPlan, report: Callable[[pb.StepResult], None]) -> None:
        raise RuntimeError("out of memory")


def test_a_failing_step_ends_the_connection_with_the_reason_and_a_traceback(caplog):
    """Never silently; and nothing that was sent afterwards is executed."""
    ours, theirs = socket.socketpair()
    data = pb.ManagerMessage(plan=pb.StepPlan()).SerializeToString()
    ours.sendall((struct.pack("<I", len(data)) + data) * 3)
    with theirs:
        serve_connection(Connection(theirs), FailingEngine(), pb.Description())
    messages = []
    with ours, ours.makefile("rb") as reader:
        while head := reader.read(4):
            messages.append(pb.WorkerMessage.FromString(reader.read(struct.unpack("<I", head)[0])))
    assert [message.WhichOneof("message") for message in messages] == ["description", "failure"]
    assert messages[1].failure == pb.Failure(is_protocol_error=False, message="RuntimeError: out of memory")
    assert "Traceback" in caplog.text


def test_worker_ends_when_its_parent_dies(model_dir, tmp_path):
    """Standard input closes with the parent, while a connection is open too."""
    worker = WorkerProcess(model_dir, tmp_path / "w")
    with worker.manager() as manager:
        manager.configure()
        log = worker.close()
    assert worker.process.returncode == 0
    assert "stopping: terminated, or the parent is gone" in log


@pytest.mark.parametrize("connects", [False, True])
def test_worker_ends_on_sigterm(model_dir, tmp_path, connects):
    """Waiting for a connection, or for a message."""
    worker = WorkerProcess(model_dir, tmp_path / "w")
    with worker.manager() as manager:
        if not connects:
            manager.close()
            time.sleep(0.1)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(_WAIT_S) == 0  # 1: it had to be ended by force
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


@pytest.mark.parametrize("name", ["CIDERY_SPEC_VERIFY_WINDOW", "CIDERY_GDN_LAZY_KERNELS"])
@pytest.mark.parametrize(
    ("command", "prog"),
    [
        (["-m", "worker", "--model", "nowhere", "--prompt", "1"], "worker"),
        (["-m", "worker.selftest"], "cidery worker selftest"),
    ],
)
@pytest.mark.parametrize("value", ["yes", ""])
def test_a_switch_that_is_neither_0_nor_1_ends_the_start_in_one_line(name, value, command, prog):
    """With Metal or without; before the model is looked for."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{prog}: error: {name} is {value!r}; allowed are 0 and 1\n"

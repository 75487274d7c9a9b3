"""Adapters of one Mac: makes the worker's like the fleet's list, and keeps those whose requests still run.

Synchronous but for reading files, which happens in threads; the worker answers whenever it comes to it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.adapter_files import adapter_bytes, adapter_digest, find_adapter
from cluster.adapters import AdapterList, AdapterReport, AdapterSpec, AdapterState, AdapterStatus
from cluster.errors import AdapterNotLoaded, InvalidRequest
from cluster.vital import run_or_exit
from protos.cidery.worker.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Adapter:
    """One content, under however many names."""

    spec: AdapterSpec
    folder: Path
    state: AdapterState = AdapterState.LOADING
    problem: str = ""
    # Its files are those that are meant, and its memory is taken.
    is_checked: bool = False
    num_bytes: int = 0
    # The present worker has been asked for it.
    is_asked: bool = False
    # A worker has had it, so requests may run with it.
    is_usable: bool = False


class MacAdapters:
    """`send` hands a message to the worker, if one runs; `on_change` tells the router soon."""

    def __init__(
        self,
        model: str,
        memory_bytes: int,
        send: Callable[[worker_pb2.ManagerMessage], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._model = model
        self._memory_bytes = memory_bytes
        self._send = send
        self._on_change = on_change
        self._adapters: dict[str, _Adapter] = {}
        self._wanted: dict[str, AdapterSpec] = {}
        self._checks: set[asyncio.Task[None]] = set()
        # Questions to the present worker, by digest.
        self._num_unanswered: Counter[str] = Counter()
        self.followed = AdapterList()

    def follow(self, wanted: AdapterList) -> None:
        """The fleet's list has changed: load what is new, and what had failed; what is gone takes no new request."""
        self.followed = wanted
        self._wanted = {spec.name: spec for spec in wanted.specs if spec.model == self._model}
        specs = {spec.digest: spec for spec in self._wanted.values()}
        for digest, adapter in list(self._adapters.items()):
            if digest not in specs:
                self._leave(digest, adapter)
        for digest, spec in specs.items():
            known = self._adapters.get(digest)
            if known is not None and known.state is AdapterState.LEAVING:
                known.spec, known.state = spec, AdapterState.READY if known.is_usable else AdapterState.LOADING
            elif known is None or known.state is AdapterState.FAILED:
                self._check(spec)
        self._on_change()

    def require(self, digest: str) -> None:
        """Raises AdapterNotLoaded unless new requests may use it."""
        adapter = self._adapters.get(digest)
        if adapter is None or adapter.state is not AdapterState.READY:
            state = "is not loaded" if adapter is None else f"is {adapter.state.value}"
            name = adapter.spec.name if adapter is not None else f"with digest {digest}"
            raise AdapterNotLoaded(f"adapter {name} {state} here; it takes no new requests")

    def let_go(self, is_used: Callable[[str], bool]) -> None:
        """Tells the worker to unload what is leaving and has no more requests. Cheap when nothing leaves."""
        for digest, adapter in list(self._adapters.items()):
            if adapter.state is AdapterState.LEAVING and not is_used(digest):
                if adapter.is_asked:
                    self._send(worker_pb2.ManagerMessage(unload_adapter=worker_pb2.UnloadAdapter(digest=digest)))
                del self._adapters[digest]
                log.info("adapter unloaded name=%s digest=%s", adapter.spec.name, digest)
                self._on_change()

    def worker_lost(self) -> None:
        """Its successor has none of them."""
        self._num_unanswered.clear()
        for adapter in self._adapters.values():
            adapter.is_asked = False

    def take_unasked(self) -> list[worker_pb2.ManagerMessage]:
        """What a new worker is still to be asked for; each is to be sent, and its answer given to `loaded`."""
        unasked = [each for each in self._adapters.values() if each.is_checked and not each.is_asked]
        for adapter in unasked:
            self._asked(adapter)
        return [_load_message(adapter) for adapter in unasked]

    def loaded(self, message: worker_pb2.AdapterLoaded) -> bool:
        """The worker's answer; False if requests that run with the adapter can't go on."""
        self._num_unanswered[message.digest] -= 1
        adapter = self._adapters.get(message.digest)
        if adapter is None or self._num_unanswered[message.digest]:
            # Unloaded, and perhaps asked for again, before the worker came to it.
            return True
        if message.refusal:
            was_usable = adapter.is_usable
            self._fail(adapter, message.refusal)
            return not was_usable
        adapter.is_usable = True
        if adapter.state is AdapterState.LOADING:
            adapter.state = AdapterState.READY
            log.info("adapter loaded name=%s digest=%s bytes=%d", adapter.spec.name, message.digest, message.num_bytes)
        self._on_change()
        return True

    def report(self) -> AdapterReport:
        """For the router: each name by itself, and contents that are leaving under their last name."""
        statuses = []
        for spec in self._wanted.values():
            adapter = self._adapters[spec.digest]
            statuses.append(AdapterStatus(spec.name, spec.digest, adapter.state, adapter.problem))
        statuses += [
            AdapterStatus(adapter.spec.name, digest, adapter.state)
            for digest, adapter in self._adapters.items()
            if adapter.state is AdapterState.LEAVING
        ]
        return AdapterReport(self.followed.version, tuple(statuses))

    def _check(self, spec: AdapterSpec) -> None:
        """Reads the files in a thread, and then asks the worker."""
        adapter = _Adapter(spec, Path(spec.path).expanduser())
        self._adapters[spec.digest] = adapter
        task = run_or_exit(self._check_and_load(adapter), "adapter")
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check_and_load(self, adapter: _Adapter) -> None:
        problem, num_bytes = await asyncio.to_thread(_problem, adapter.spec)
        if self._adapters.get(adapter.spec.digest) is not adapter:
            return
        taken = sum(other.num_bytes for other in self._adapters.values() if other.is_checked)
        if not problem and taken + num_bytes > self._memory_bytes:
            left = max(0, self._memory_bytes - taken)
            problem = f"it takes {num_bytes} bytes; of the {self._memory_bytes} of --lora-memory {left} are left"
        if problem:
            self._fail(adapter, problem)
            return
        adapter.is_checked, adapter.num_bytes = True, num_bytes
        # Without a worker it comes with the next one.
        if self._send(_load_message(adapter)):
            self._asked(adapter)

    def _asked(self, adapter: _Adapter) -> None:
        adapter.is_asked = True
        self._num_unanswered[adapter.spec.digest] += 1

    def _leave(self, digest: str, adapter: _Adapter) -> None:
        if adapter.is_checked:
            adapter.state = AdapterState.LEAVING
        else:
            del self._adapters[digest]

    def _fail(self, adapter: _Adapter, problem: str) -> None:
        log.error("adapter failed name=%s error=%s", adapter.spec.name, problem)
        if adapter.state is AdapterState.LEAVING:
            del self._adapters[adapter.spec.digest]
        adapter.is_checked = adapter.is_asked = adapter.is_usable = False
        adapter.state, adapter.problem = AdapterState.FAILED, problem
        self._on_change()


def _load_message(adapter: _Adapter) -> worker_pb2.ManagerMessage:
    load = worker_pb2.LoadAdapter(digest=adapter.spec.digest, folder=str(adapter.folder))
    return worker_pb2.ManagerMessage(load_adapter=load)


def _problem(spec: AdapterSpec) -> tuple[str, int]:
    """Why the files here are not those that are meant, empty if they are; and their bytes."""
    try:
        folder = find_adapter(spec.path)
        digest = adapter_digest(folder)
    except InvalidRequest as error:
        return error.detail, 0
    except OSError as error:
        return f"{spec.path} can't be read: {error}", 0
    if digest != spec.digest:
        return f"{spec.path} here has the digest {digest}, that of the gateway {spec.digest}; copy one set", 0
    return "", adapter_bytes(folder)

"""The gateway's end of the node protocol: one multiplexed stream to each Mac, one queue for each request on it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

import grpc

from cluster import wire
from cluster.config import LINK_SILENCE_S, MAX_NODE_MESSAGE_BYTES
from cluster.errors import MacLost
from cluster.kv.hashing import BlockHash
from cluster.routing.decision import Decision
from cluster.scheduling.request import Request, Update
from protos.cidery.node.v1 import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_NODE_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_NODE_MESSAGE_BYTES),
)


class MacLink:
    """One Mac's stream. Broken once, it stays broken: a new link is made for the next request."""

    def __init__(
        self,
        mac: str,
        epoch: int,
        address: str,
        on_lost: Callable[["MacLink"], None],
        silence_s: float = LINK_SILENCE_S,
    ) -> None:
        self.mac = mac
        self.epoch = epoch
        self.address = address
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._outgoing: asyncio.Queue[node_pb2.ConnectRequest] = asyncio.Queue()
        self._incoming: dict[str, asyncio.Queue[node_pb2.Update | MacLost]] = {}
        self.is_broken = False
        self._log_level = logging.WARNING
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def run(self, request: Request, root: BlockHash, *, ignore_eos: bool) -> AsyncGenerator[Update]:
        """Updates of one request until it has finished; leaving early aborts it on the Mac.

        Raises MacLost when the stream breaks, and whatever the Mac refuses the request with.
        """
        updates: asyncio.Queue[node_pb2.Update | MacLost] = asyncio.Queue()
        if self.is_broken:
            raise MacLost(f"{self.mac} is not reachable")
        self._incoming[request.request_id] = updates
        self._outgoing.put_nowait(wire.request_to_open(request, root, ignore_eos=ignore_eos))
        has_ended = False
        try:
            while not has_ended:
                message = await updates.get()
                if isinstance(message, MacLost):
                    has_ended = True
                    raise message
                has_ended = bool(message.finish_reason) or message.HasField("failure")
                if message.HasField("failure"):
                    raise wire.failure_from_proto(message.failure)
                yield wire.update_from_proto(message)
        finally:
            self._incoming.pop(request.request_id, None)
            if not has_ended:
                abort = node_pb2.Abort(request_id=request.request_id)
                self._outgoing.put_nowait(node_pb2.ConnectRequest(abort=abort))

    async def close(self) -> None:
        """Ends the stream, and with it every request on it."""
        self._log_level = logging.DEBUG
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        reason = "the stream was closed"
        try:
            async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
                call = node_pb2_grpc.NodeServiceStub(channel).Connect()
                sender = asyncio.create_task(self._send(call))
                try:
                    while (message := await asyncio.wait_for(call.read(), self._silence_s)) is not grpc.aio.EOF:
                        for update in message.updates:
                            queue = self._incoming.get(update.request_id)
                            if queue is not None:  # else it was aborted meanwhile
                                queue.put_nowait(update)
                finally:
                    sender.cancel()
                    await asyncio.gather(sender, return_exceptions=True)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except TimeoutError:
            reason = f"nothing was heard for {self._silence_s:.0f} s"
        finally:
            self.is_broken = True
            for queue in self._incoming.values():
                queue.put_nowait(MacLost(f"{self.mac} was lost: {reason}"))
            self._on_lost(self)
            log.log(self._log_level, "mac link ended mac=%s address=%s reason=%s", self.mac, self.address, reason)

    async def _send(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            await call.write(await self._outgoing.get())


class MacLinks:
    """All links of a gateway, made when first needed."""

    def __init__(self, on_lost: Callable[[str, int], None]) -> None:
        self._links: dict[str, MacLink] = {}
        self._on_lost = on_lost

    def get(self, decision: Decision) -> MacLink:
        """The link to the chosen Mac at its present address."""
        link = self._links.get(decision.mac)
        if link is None or link.is_broken or link.address != decision.address:
            link = MacLink(decision.mac, decision.epoch, decision.address, self._lost)
            self._links[decision.mac] = link
        link.epoch = decision.epoch
        return link

    async def close(self) -> None:
        """Ends all streams."""
        links, self._links = self._links, {}
        for link in links.values():
            await link.close()

    def _lost(self, link: MacLink) -> None:
        if self._links.get(link.mac) is link:
            del self._links[link.mac]
            self._on_lost(link.mac, link.epoch)

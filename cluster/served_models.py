"""The models that this gateway can serve: tokenizer and defaults from its own files, the rest from the fleet."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.adapters import AdapterState, AdapterView
from cluster.config import ModelConfig
from cluster.errors import ActorAway, InvalidRequest, ModelNotFound, NoMacReady, StartupFailed
from cluster.grammars import GrammarChecker
from cluster.kv.hashing import BlockHash
from cluster.model_files import find_model, pooling_of
from cluster.ray_calls import ActorCaller
from cluster.routing.mac import MacState, MacStatus
from cluster.sampling import Defaults, SamplingRequest, check_bad_words
from cluster.scheduling.request import Pooling
from cluster.tokenizer import Message, Prompt, Tokenizer

# Shorter texts take about a millisecond, which a hop to a thread would double.
_LONG_CHARACTERS = 20_000


@dataclass(slots=True)
class ServedModel:
    """One model by its public name. `root` is None until a Mac that serves it has joined."""

    name: str
    tokenizer: Tokenizer
    defaults: Defaults
    created_s: int
    grammars: GrammarChecker
    # Of embeddings whose requests don't say.
    pooling: Pooling = Pooling.LAST
    # Digest of the adapter that this is, and the model that it adapts; both empty for a model.
    adapter: str = ""
    parent: str = ""
    root: BlockHash | None = None
    block_size: int = 0
    max_model_len: int = 0
    num_macs: int = 0

    @property
    def run_by(self) -> str:
        """Name of the model whose Macs run it."""
        return self.parent or self.name


class ServedModels:
    """Kept current by `refresh`, which the gateway calls every second."""

    def __init__(self, router: ActorCaller) -> None:
        self._router = router
        self._models: dict[str, ServedModel] = {}
        self._adapters: dict[str, ServedModel] = {}
        # A tokenizer serves one at a time, be it the event loop or a thread.
        self._encoding = asyncio.Lock()
        # Whether the router answered the last time.
        self.is_current = False

    async def load(self, config: ModelConfig, created_s: int) -> None:
        """Reads a model's tokenizer; takes seconds, off the event loop."""
        folder = await asyncio.to_thread(find_model, config.path)
        model = await asyncio.to_thread(_load, config.name, folder, created_s)
        model.grammars.start()
        self._models[config.name] = model

    async def refresh(self) -> None:
        """Learns from the router which Macs serve what. Raises StartupFailed if one tokenizes otherwise than we do."""
        try:
            digests = await self._router("tokenizer_digests")
            fleet = await self._router("fleet")
            adapters = await self._router("adapter_view")
        except ActorAway:
            self.is_current = False
            raise
        self.is_current = True
        for model in self._models.values():
            theirs = digests.get(model.name)
            if theirs is not None and theirs != model.tokenizer.digest:
                raise StartupFailed(f"{model.name}: the Macs' tokenizer files differ from the gateway's; copy one set")
            macs = [mac for mac in fleet if mac.info.model == model.name and mac.state is not MacState.LOST]
            model.num_macs = len([mac for mac in macs if mac.state is MacState.READY])
            if macs:
                model.root = macs[0].info.root_hash
                model.block_size = macs[0].info.block_size
                model.max_model_len = max(mac.info.max_model_len for mac in macs)
        self._refresh_adapters(adapters, fleet)

    def _refresh_adapters(self, view: AdapterView, fleet: Sequence[MacStatus]) -> None:
        """Each adapter as a model of its own. A router that has just been restarted knows of none: nothing changes."""
        if not view.wanted.version:
            return
        ready = [mac.info.name for mac in fleet if mac.state is MacState.READY]
        adapters = {}
        for spec in view.wanted.specs:
            model = self._models.get(spec.model)
            if model is None or model.root is None:
                continue
            statuses = [each for mac in ready for each in view.by_mac.get(mac, ()) if each.name == spec.name]
            num_macs = len([each for each in statuses if each.state is AdapterState.READY])
            adapters[spec.name] = replace(
                model,
                name=spec.name,
                adapter=spec.digest,
                parent=spec.model,
                created_s=spec.created_s,
                num_macs=num_macs,
            )
        self._adapters = adapters

    async def text_prompt(self, model: ServedModel, text: str) -> Prompt:
        """A plain prompt. Raises InvalidRequest, RequestTooLong."""
        return await self._encode(model, len(text), lambda: model.tokenizer.encode(text))

    async def chat_prompt(self, model: ServedModel, messages: Sequence[Message]) -> Prompt:
        """A conversation. Raises InvalidRequest, RequestTooLong."""
        num_characters = sum(len(message["content"]) for message in messages)
        return await self._encode(model, num_characters, lambda: model.tokenizer.encode_chat(messages))

    async def prepare(self, model: ServedModel, asked: SamplingRequest) -> SamplingRequest:
        """Bad words in tokens, and the grammar compiled, so that nothing is queued for a bad one.

        Raises InvalidRequest.
        """
        if not asked.needs_tokenizer:
            return asked
        spelled: set[tuple[int, ...]] = set()
        if asked.bad_words:
            check_bad_words(asked.bad_words)
            texts = [text for word in asked.bad_words for text in (word, f" {word}")]
            async with self._encoding:
                spelled = {model.tokenizer.encode_plain(text) for text in texts}
        if asked.grammar is not None:
            await model.grammars.check(asked.grammar)
        return replace(asked, banned_sequences=tuple(sorted(spelled)))

    async def _encode(self, model: ServedModel, num_characters: int, encode: Callable[[], Prompt]) -> Prompt:
        """A long text is encoded in a thread, so that no running stream waits for it."""
        model.tokenizer.check_length(num_characters, model.max_model_len)
        async with self._encoding:
            return encode() if num_characters < _LONG_CHARACTERS else await asyncio.to_thread(encode)

    def all(self) -> tuple[ServedModel, ...]:
        """Models that a Mac serves or has served, and their adapters."""
        models = tuple(model for model in self._models.values() if model.root is not None)
        return models + tuple(self._adapters.values())

    def names(self) -> tuple[str, ...]:
        """Of models, adapters left out."""
        return tuple(self._models)

    def get(self, name: str) -> ServedModel:
        """By name; an empty name means the only one. Raises ModelNotFound, InvalidRequest, NoMacReady."""
        if not name:
            if len(self._models) != 1:
                raise InvalidRequest("model", f"is missing; served: {', '.join(sorted(self._models))}")
            name = next(iter(self._models))
        model = self._models.get(name) or self._adapters.get(name)
        if model is None:
            served = ", ".join(sorted([*self._models, *self._adapters]))
            raise ModelNotFound(f"model {name!r} is not served; served: {served}")
        if model.root is None:
            raise NoMacReady(f"model {name!r}: no Mac has finished loading it yet")
        return model


def _load(name: str, folder: Path, created_s: int) -> ServedModel:
    tokenizer = Tokenizer(folder)
    return ServedModel(
        name, tokenizer, Defaults.of_model(folder), created_s, GrammarChecker(tokenizer), pooling_of(folder)
    )

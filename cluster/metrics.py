"""Prometheus metrics of the gateway. Names carry their unit; one registry a process."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.job import Completed

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """All series, by model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["model"]
        self._running = Gauge("cidery_requests_running", "Requests in the gateway", labels, registry=self.registry)
        self._ended = Counter(
            "cidery_requests", "Requests by how they ended", [*labels, "outcome"], registry=self.registry
        )
        self._prompt = Counter("cidery_prompt_tokens", "Prompt tokens", labels, registry=self.registry)
        self._cached = Counter(
            "cidery_cached_tokens", "Prompt tokens found in a Mac's cache", labels, registry=self.registry
        )
        self._generated = Counter("cidery_generated_tokens", "Generated tokens", labels, registry=self.registry)
        self._drafted = Counter("cidery_drafted_tokens", "Tokens guessed and verified", labels, registry=self.registry)
        self._accepted = Counter(
            "cidery_accepted_tokens", "Generated tokens that had been guessed", labels, registry=self.registry
        )
        self._first = Histogram(
            "cidery_first_token_seconds", "Arrival to first token", labels, buckets=_SECONDS, registry=self.registry
        )
        self._between = Histogram(
            "cidery_inter_token_seconds",
            "Between two tokens of a request",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )

    @contextlib.contextmanager
    def request(self, model: str) -> Iterator["ObservedRequest"]:
        """Counts a request as running, and at its end by how it ended."""
        observed = ObservedRequest(self, model)
        running = self._running.labels(model)
        running.inc()
        outcome = "failed"
        try:
            yield observed
            outcome = observed.outcome
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "aborted"
            raise
        finally:
            running.dec()
            self._ended.labels(model, outcome).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def first_token(self, model: str, seconds: float) -> None:
        """Time to first token of a completed request."""
        self._first.labels(model).observe(seconds)

    def between_tokens(self, model: str, seconds: float) -> None:
        """One gap between tokens."""
        self._between.labels(model).observe(seconds)

    def count(self, model: str, completed: Completed) -> None:
        """Token counters of a completed request."""
        self._prompt.labels(model).inc(completed.num_prompt_tokens)
        self._cached.labels(model).inc(completed.num_cached_tokens)
        self._generated.labels(model).inc(completed.num_completion_tokens)
        self._drafted.labels(model).inc(completed.num_drafted_tokens)
        self._accepted.labels(model).inc(completed.num_accepted_tokens)


class ObservedRequest:
    """One request on its way."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._last_s: float | None = None
        self.outcome = "aborted"

    def tokens(self, num_tokens: int) -> None:
        """Tokens of one step arrived."""
        now_s = time.monotonic()
        if self._last_s is not None and num_tokens:
            self._metrics.between_tokens(self._model, now_s - self._last_s)
        self._last_s = now_s

    def completed(self, completed: Completed) -> None:
        """The request has ended as it should."""
        self.outcome = completed.finish.name.lower()
        self._metrics.first_token(self._model, completed.first_token_s)
        self._metrics.count(self._model, completed)

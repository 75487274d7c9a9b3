"""Prompts that are read: log-probabilities of their tokens and pooled vectors, against mlx-lm's own forward."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from cluster.scheduling.request import Finish, Pooling, Reading
from tests.golden.cases import CASES, REPRESENTATIVES, config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.golden.scenario import LOGPROB_TOLERANCE, prompts_of, reference
from tests.worker.families import VOCAB_SIZE
from worker import models

SCORED = Reading(num_top_logprobs=3)


def cases():
    return [pytest.param(case, marks=[] if case in REPRESENTATIVES else pytest.mark.matrix, id=case) for case in CASES]


class Oracle:
    """mlx-lm's forward of one prompt at once, and what enters the output projection meanwhile."""

    def __init__(self, model) -> None:
        self.model = models._text_model(model)

    def logprobs(self, prompt) -> np.ndarray:
        """`[tokens, vocab]`."""
        logits = self._forward(prompt)[0].astype(mx.float32)
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    def _forward(self, prompt) -> mx.array:
        # Over caches, as when it generates: without them some families forget their windows.
        return self.model(mx.array([prompt]), cache=make_prompt_cache(self.model))

    def hidden(self, prompt) -> np.ndarray | None:
        """`[tokens, hidden]`, if the family has a projection that can be watched."""
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            for paths, method in ((models._HEADS, "__call__"), (models._EMBEDDINGS, "as_linear")):
                for path in paths:
                    owner, name = models._owner(self.model, path)
                    module = getattr(owner, name, None)
                    if isinstance(module, Module) and hasattr(type(module), method):
                        watched = type("Watched", (type(module),), {method: _watching(type(module), method, seen)})
                        patch.setattr(module, "__class__", watched)
            self._forward(prompt)
        return np.array(seen[-1][0].astype(mx.float32)) if seen and seen[-1].ndim == 3 else None


def _watching(cls, method, seen):
    original = getattr(cls, method)

    def call(self, x):
        seen.append(x)
        return original(self, x)

    return call


def check_scores(answer, logprobs: np.ndarray, num_top: int = 3) -> None:
    prompt = answer.request.token_ids[: answer.request.num_prompt_tokens]
    assert [told.token_id for told in answer.prompt_logprobs] == list(prompt[1:])
    for told, row in zip(answer.prompt_logprobs, logprobs[:-1], strict=True):
        assert told.logprob == pytest.approx(row[told.token_id], abs=LOGPROB_TOLERANCE)
        assert len(told.top) == num_top
        assert [value for _, value in told.top] == pytest.approx(
            np.sort(row)[::-1][:num_top].tolist(), abs=LOGPROB_TOLERANCE
        )
        assert all(value == pytest.approx(row[token], abs=LOGPROB_TOLERANCE) for token, value in told.top)


@pytest.mark.parametrize("case", cases())
def test_prompts_read_in_a_mixed_batch_are_like_mlx_lms_forward(case):
    model, prompts = make_model(case), prompts_of(VOCAB_SIZE)
    oracle = Oracle(model)
    logprobs = [oracle.logprobs(prompt) for prompt in prompts]
    hidden = [oracle.hidden(prompt) for prompt in prompts]
    generated = reference(model, prompts[1], 6)
    mac = InProcessMac(model, config_of(case))
    for turn in ("first", "again, from a warm cache"):
        plain = mac.add(f"plain {turn}", prompts[1], 6)
        scored = [mac.add(f"scored {i} {turn}", prompts[i], 0, reading=SCORED) for i in (2, 4, 3)]
        echoed = mac.add(f"echoed {turn}", prompts[1], 6, reading=SCORED)
        pooled = [
            (how, mac.add(f"{how.name} {i} {turn}", prompts[i], 0, reading=Reading(pooling=how)), hidden[i])
            for how, i in ((Pooling.MEAN, 2), (Pooling.LAST, 2), (Pooling.CLS, 4), (Pooling.MEAN, 3))
        ]
        mac.step()
        mac.step()
        for name in (f"scored 2 {turn}", f"MEAN 2 {turn}"):
            if name in mac.scheduler._roster.by_id:
                mac.preempt(name)
        mac.run()
        for answer, i in zip(scored, (2, 4, 3), strict=True):
            assert answer.finish is Finish.LENGTH
            assert answer.tokens == []
            check_scores(answer, logprobs[i])
        check_scores(echoed, logprobs[1])
        assert plain.tokens == echoed.tokens == generated.tokens
        for how, answer, rows in pooled:
            if rows is None:
                assert answer.failure
                continue
            expected = {Pooling.MEAN: rows.mean(axis=0), Pooling.LAST: rows[-1], Pooling.CLS: rows[0]}[how]
            assert answer.embedding == pytest.approx(expected.tolist(), abs=1e-4), how
        if turn != "first":
            assert all(answer.num_cached_tokens == 0 for answer in (*scored, echoed))

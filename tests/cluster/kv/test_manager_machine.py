"""See hybrid_machine."""

from hypothesis import settings

from tests.cluster.kv.hybrid_machine import HybridMachine

HybridMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestManager = HybridMachine.TestCase

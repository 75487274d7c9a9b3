"""Adapters in mixed batches: each request gets what mlx-lm generates with its adapter loaded, and no other."""

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.tuner.utils import load_adapters

from cluster.scheduling.request import Pooling, Reading
from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.golden.cases import CASES, REPRESENTATIVES, config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.golden.scenario import LOGPROB_TOLERANCE, problems, prompts_of, reference
from tests.worker.adapter_folders import write_adapter
from tests.worker.families import VOCAB_SIZE
from worker.metal import rope
from worker.metal.dispatch import twin_kernels

NEW_TOKENS = 10
# Families that read a layer's weight past the layer: mlx-lm can't run an adapter on all of theirs.
KEYS = {
    "gemma3n": ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"],
    "kimi_k3": ["self_attn.o_proj", "mlp.down_proj"],
}


def cases():
    return [pytest.param(case, marks=[] if case in REPRESENTATIVES else pytest.mark.matrix, id=case) for case in CASES]


def load(mac: InProcessMac, digest: str, folder) -> None:
    loaded = mac.engine.load_adapter(pb.LoadAdapter(digest=digest, folder=str(folder)))
    assert not loaded.refusal
    assert loaded.num_bytes > 0


def check(mac: InProcessMac, oracles: dict, prompts) -> None:
    """All adapters and the base in one batch of ragged prompts, twice: the second time from the cache."""
    expected = {
        (name, at): reference(oracle, prompts[at], NEW_TOKENS)
        for name, oracle in oracles.items()
        for at in range(len(prompts))
    }
    found = []
    for turn in range(2):
        answers = {
            (name, at): mac.add(f"{turn} {name} {at}", prompts[at], NEW_TOKENS, adapter=name) for name, at in expected
        }
        for _ in range(5):
            mac.step()
        for name in oracles:
            request_id = f"{turn} {name} 2"
            if request_id in mac.scheduler._roster.by_id:
                mac.preempt(request_id)
        mac.run()
        for key, answer in answers.items():
            found += problems(answer, expected[key], LOGPROB_TOLERANCE)
            if turn == 0 and key[1] == 0:
                assert answer.num_cached_tokens == 0
            if turn == 1 and len(prompts[key[1]]) > 32 and not mac.kv.has_states:
                assert answer.num_cached_tokens > 0
    assert not found


@pytest.mark.parametrize("case", cases())
def test_several_adapters_in_a_batch_are_each_like_mlx_lms_own(case, tmp_path):
    model, prompts = make_model(case), prompts_of(VOCAB_SIZE)[1:4]
    folders = {
        name: write_adapter(tmp_path / name, make_model(case), rank=rank, seed=rank, keys=KEYS.get(case))
        for name, rank in (("a", 3), ("b", 8))
    }
    oracles = {"": make_model(case)} | {
        name: load_adapters(make_model(case), str(folder)) for name, folder in folders.items()
    }
    for oracle in oracles.values():
        oracle.eval()
    mac = InProcessMac(model, config_of(case))
    for name, folder in folders.items():
        load(mac, name, folder)
    check(mac, oracles, prompts)
    for name in folders:
        mac.drain()
        mac.engine.execute(pb.StepPlan(step_id=9999, released_seq_ids=list(mac.engine._sequences)))
        mac.engine.unload_adapter(pb.UnloadAdapter(digest=name))
    kinds = {type(module).__name__ for module in mac.engine._loaded.model.modules()}
    assert not {kind for kind in kinds if kind.startswith(("Adapted", "Parting"))}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_dora": True}, "kv_b_proj is folded into query and output here, for which there is no DoRA"),
        ({"config_rank": 2}, "kv_b_proj.lora_a has shape (16, 3); with rank 2 it must be (16, 2)"),
    ],
)
def test_what_a_folded_layer_cannot_have_is_refused(options, words, tmp_path):
    rank = options.pop("config_rank", 3)
    keys = ["self_attn.kv_b_proj"]
    folder = write_adapter(tmp_path / "a", make_model("deepseek_v2"), rank=3, keys=keys, **options)
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace('"rank": 3', f'"rank": {rank}'))
    mac = InProcessMac(make_model("deepseek_v2"), config_of("deepseek_v2"))
    loaded = mac.engine.load_adapter(pb.LoadAdapter(digest="a", folder=str(folder)))
    assert words in loaded.refusal


def quantised(case: str, *, is_tied: bool = False):
    model = make_model(case, is_tied=is_tied)
    nn.quantize(model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0)
    model.eval()
    mx.eval(model.parameters())
    return model


# Case, whether quantised, and the options of two adapters in one batch.
KINDS = {
    "dora beside lora": ("qwen2", False, {"rank": 4, "is_dora": True}, {"rank": 2}),
    "dora of a quantised model": ("llama", True, {"rank": 4, "is_dora": True}, {"rank": 2, "is_dora": True}),
    "embedding that is the head too": (
        "llama tied",
        False,
        {"rank": 4, "keys": ["model.embed_tokens", "self_attn.q_proj"]},
        {"rank": 2, "keys": ["model.embed_tokens"], "is_dora": True},
    ),
    "quantised embedding that is the head too": (
        "llama tied",
        True,
        {"rank": 4, "keys": ["model.embed_tokens", "mlp.down_proj"]},
        {"rank": 2, "keys": ["model.embed_tokens"]},
    ),
    "head alone": ("qwen3", False, {"rank": 4, "keys": ["lm_head"]}, {"rank": 2, "keys": ["lm_head"], "is_dora": True}),
    "quantised experts": ("qwen3_moe", True, {"rank": 4}, {"rank": 2, "keys": ["mlp.switch_mlp.down_proj"]}),
    "experts of one adapter alone": ("mixtral", False, {"rank": 4}, {"rank": 2, "keys": ["self_attn.q_proj"]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_that_the_tuner_makes(kind, tmp_path):
    case, is_quantised, *options = KINDS[kind]

    def make():
        return quantised(case) if is_quantised else make_model(case)

    folders = {
        name: write_adapter(tmp_path / name, make(), seed=seed, **each)
        for seed, (name, each) in enumerate(zip("ab", options, strict=True))
    }
    oracles = {"": make()} | {name: load_adapters(make(), str(folder)) for name, folder in folders.items()}
    for oracle in oracles.values():
        oracle.eval()
    mac = InProcessMac(make(), config_of(case))
    for name, folder in folders.items():
        load(mac, name, folder)
    check(mac, oracles, prompts_of(VOCAB_SIZE)[1:4])


def test_prompts_read_through_an_adapter_are_like_mlx_lms_forward(tmp_path):
    folder = write_adapter(tmp_path / "a", make_model("qwen3_moe"), rank=4)
    oracle = load_adapters(make_model("qwen3_moe"), str(folder))
    oracle.eval()
    prompt = prompts_of(VOCAB_SIZE)[2]
    logits = oracle(mx.array([prompt]))[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mac = InProcessMac(make_model("qwen3_moe"), config_of("qwen3_moe"))
    load(mac, "a", folder)
    mac.add("base", prompt, 4)
    scored = mac.add("scored", prompt, 0, reading=Reading(num_top_logprobs=0), adapter="a")
    pooled = mac.add("pooled", prompt, 0, reading=Reading(pooling=Pooling.MEAN), adapter="a")
    mac.run()
    told = [each.logprob for each in scored.prompt_logprobs]
    assert told == pytest.approx([float(logprobs[at, prompt[at + 1]]) for at in range(63)], abs=LOGPROB_TOLERANCE)
    assert pooled.embedding == pytest.approx(oracle.model(mx.array([prompt]))[0].mean(axis=0).tolist(), abs=1e-4)


@pytest.mark.parametrize("case", ["qwen3_next", "lfm2", "nemotron_h", "llama tied"])
def test_rows_keep_their_adapters_where_kernels_take_all_rows_at_once(case, tmp_path):
    """As on a GPU, by the kernels' twins: states updated in their slots, queries and keys turned together."""
    folders = {name: write_adapter(tmp_path / name, make_model(case), rank=len(name) + 2) for name in ("a", "bb")}
    oracles = {"": make_model(case)} | {
        name: load_adapters(make_model(case), str(folder)) for name, folder in folders.items()
    }
    for oracle in oracles.values():
        oracle.eval()
    kernels = replace(twin_kernels(), rope=rope.twin, updates_states_in_place=case != "llama tied")
    mac = InProcessMac(make_model(case), config_of(case), kernels=kernels)
    for name, folder in folders.items():
        load(mac, name, folder)
    check(mac, oracles, prompts_of(VOCAB_SIZE)[1:4])


@pytest.mark.parametrize("case", ["llama tied", "qwen3_moe", "qwen3_next"])
def test_guesses_are_verified_through_the_sequences_own_adapter(case, tmp_path):
    """Also of prompts that are scored first."""
    folder = write_adapter(tmp_path / "a", make_model(case), rank=3)
    oracles = {"": make_model(case), "a": load_adapters(make_model(case), str(folder))}
    oracles["a"].eval()
    prompts = prompts_of(VOCAB_SIZE)[1:4]
    expected = {
        (name, at): reference(oracle, prompt, 20)
        for name, oracle in oracles.items()
        for at, prompt in enumerate(prompts)
    }
    known = [prompts[at] + one.tokens for (_, at), one in expected.items()]
    mac = InProcessMac(make_model(case), config_of(case), max_drafts=4, answers_to_guess=known)
    load(mac, "a", folder)
    scored = Reading(num_top_logprobs=0)
    answers = {
        (name, at, is_scored): mac.add(
            f"{name} {at} {is_scored}", prompts[at], 20, adapter=name, reading=scored if is_scored else None
        )
        for name, at in expected
        for is_scored in (False, True)
    }
    mac.run()
    assert mac.num_accepted > 20
    found = [each for (name, at, _), one in answers.items() for each in problems(one, expected[name, at], 1e-4)]
    assert not found
    for (name, at, is_scored), answer in answers.items():
        assert len(answer.prompt_logprobs) == (len(prompts[at]) - 1 if is_scored else 0), name

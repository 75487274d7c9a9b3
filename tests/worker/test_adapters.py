"""Adapters come and go: what is refused and why, that layers change back, and that rows never mix."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters

from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.worker.adapter_folders import write_adapter
from tests.worker.driver import ROOT, configure_of, make_engine
from tests.worker.families import config_of, make_model
from worker.adapter_rows import BASE, StepAdapters
from worker.adapters import Adapters
from worker.attention import Step
from worker.batch import Batch, Span
from worker.errors import AdapterRefused, ProtocolError
from worker.metal.dispatch import twin_kernels

CASE = "qwen3_moe"
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("adapters"))


def write_all(root):
    return {
        "a": write_adapter(root / "a", make_model(CASE), rank=3, seed=1),
        "b": write_adapter(root / "b", make_model(CASE), rank=2, seed=2, keys=["self_attn.q_proj"], is_dora=True),
        "c": write_adapter(root / "c", make_model(CASE), rank=4, seed=3, keys=["mlp.switch_mlp.up_proj", "lm_head"]),
    }


@pytest.fixture
def adapters():
    return Adapters(make_model(CASE), Step(twin_kernels()))


def changed(folder, target, *, config=None, tensors=None, raw=None):
    """A copy of an adapter with other content."""
    shutil.copytree(folder, target)
    if config is not None:
        file = target / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if tensors is not None:
        file = target / "adapters.safetensors"
        mx.save_safetensors(str(file), tensors(dict(mx.load(str(file)))))
    if raw is not None:
        name, data = raw
        (target / name).write_bytes(data)
    return target


Q = "model.layers.0.self_attn.q_proj"


def both(path):
    return {f"{path}.lora_a": mx.zeros((3, 3)), f"{path}.lora_b": mx.zeros((3, 3))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"fine_tune_type": "full"}}, "fine_tune_type is full"),
        ({"config": {"fine_tune_type": "lokr"}}, "fine_tune_type is 'lokr'; supported are lora, dora"),
        ({"config": {"lora_parameters": None}}, "has no lora_parameters"),
        ({"config": {"lora_parameters": None, "peft_type": "LORA"}}, "PEFT's format"),
        ({"config": {"lora_parameters": {"rank": 0, "scale": 1}}}, "rank must be a positive integer, got 0"),
        ({"config": {"lora_parameters": {"rank": True, "scale": 1}}}, "rank must be a positive integer, got True"),
        ({"config": {"lora_parameters": {"rank": 3}}}, "scale must be a number, got None"),
        ({"config": {"lora_parameters": {"rank": 3, "scale": float("nan")}}}, "scale must be a number, got nan"),
        ({"config": {"lora_parameters": {"rank": 9, "scale": 1}}}, "with rank 9 it must be"),
        ({"raw": ("adapter_config.json", b"[]")}, "must hold an object, got list"),
        ({"raw": ("adapter_config.json", b"{")}, "is not JSON"),
        ({"raw": ("adapter_config.json", b"\xff")}, "is not JSON"),
        ({"raw": ("adapters.safetensors", b"short")}, "can't be read"),
        ({"raw": ("adapters.safetensors", b"")}, "can't be read"),
        ({"tensors": lambda t: t | {f"{Q}.lora_c": mx.zeros((1,))}}, f"{Q}.lora_c is no tensor of a lora adapter"),
        ({"tensors": lambda t: t | {f"{Q}.m": mx.zeros((1,))}}, f"{Q}.m is no tensor of a lora adapter"),
        ({"tensors": lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_b"}}, f"{Q} lacks lora_b"),
        ({"tensors": lambda t: t | {f"{Q}.lora_b": mx.zeros((3, 2), mx.int32)}}, "floating point is wanted"),
        ({"tensors": lambda t: t | {f"{Q}.lora_a": t[f"{Q}.lora_a"].T}}, f"{Q}.lora_a has shape (3, 32)"),
        ({"tensors": lambda t: both("model.layers.9.x")}, "has no layer model.layers.9.x"),
        ({"tensors": lambda t: both("model.norm")}, "model.norm is a RMSNorm; adapters are for linear, switch and"),
        ({"tensors": lambda t: {f"{key.replace('layers.', 'layers.7')}": v for key, v in t.items()}}, "; and "),
    ],
)
def test_what_does_not_fit_is_refused_by_name(folders, tmp_path, adapters, change, words):
    before = [type(module) for module in adapters._model.modules()]
    with pytest.raises(AdapterRefused) as refused:
        adapters.load("x", changed(folders["a"], tmp_path / "x", **change))
    assert words in str(refused.value)
    assert "x" not in adapters
    assert [type(module) for module in adapters._model.modules()] == before


def test_missing_folders_and_files_are_refused(folders, tmp_path, adapters):
    with pytest.raises(AdapterRefused, match="is not a folder"):
        adapters.load("x", tmp_path / "nowhere")
    (tmp_path / "x").mkdir()
    with pytest.raises(AdapterRefused, match=r"has no adapter_config\.json"):
        adapters.load("x", tmp_path / "x")
    shutil.copy(folders["a"] / "adapter_config.json", tmp_path / "x")
    with pytest.raises(AdapterRefused, match=r"has no adapters\.safetensors"):
        adapters.load("x", tmp_path / "x")


def test_dora_of_experts_is_refused(folders, tmp_path, adapters):
    path = "model.layers.1.mlp.switch_mlp.up_proj"

    def as_dora(tensors):
        return {f"{path}.{leaf}": tensors[f"{path}.{leaf}"] for leaf in ("lora_a", "lora_b")} | {
            f"{path}.m": mx.zeros((1,))
        }

    folder = changed(folders["a"], tmp_path / "x", config={"fine_tune_type": "dora"}, tensors=as_dora)
    with pytest.raises(AdapterRefused, match=f"{path} is a SwitchLinear, for which there is no DoRA"):
        adapters.load("x", folder)


def test_a_layer_whose_rows_cannot_be_told_apart_is_refused(folders, adapters):
    """As if a family turned its rows before a layer."""
    layer = type(adapters._model.model.layers[0].self_attn)
    original = layer.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "__call__", lambda self, x, *args, **kw: original(self, x.swapaxes(0, 1), *args, **kw))
        with pytest.raises(AdapterRefused, match="sees 1 entries, which are neither the step's 3 rows"):
            adapters.load("x", folders["b"])
    assert "x" not in adapters
    adapters.load("x", folders["b"])


class TestEngine:
    def engine(self):
        return make_engine(make_model(CASE), config_of(CASE))

    def plan(self, engine, adapter):
        new = pb.NewSequence(seq_id=1, token_ids=[1, 2], num_prompt_tokens=2, adapter=adapter)
        return pb.StepPlan(
            step_id=1,
            new_sequences=[new],
            slices=[
                pb.Slice(seq_id=1, num_tokens=2, samples=True, new_blocks=[pb.GroupBlocks(group=0, block_ids=[1])])
            ],
        )

    def test_a_sequence_with_an_adapter_that_is_not_there_breaks_the_protocol(self, folders):
        engine = self.engine()
        with pytest.raises(ProtocolError, match="sequence 1: adapter 'a' is not loaded"):
            engine.execute(self.plan(engine, "a"))

    def test_one_that_still_runs_after_the_unloading_does_too(self, folders):
        engine = self.engine()
        assert not engine.load_adapter(pb.LoadAdapter(digest="a", folder=str(folders["a"]))).refusal
        engine.execute(self.plan(engine, "a"))
        engine.unload_adapter(pb.UnloadAdapter(digest="a"))
        later = pb.StepPlan(step_id=2, slices=[pb.Slice(seq_id=1, start=2, num_tokens=1, samples=True)])
        with pytest.raises(ProtocolError, match="adapter 'a' is not loaded"):
            engine.execute(later)

    @pytest.mark.parametrize("digest", ["", "a"])
    def test_a_load_without_a_digest_or_of_one_that_is_there_does_too(self, folders, digest):
        engine = self.engine()
        engine.load_adapter(pb.LoadAdapter(digest="a", folder=str(folders["a"])))
        with pytest.raises(ProtocolError, match="empty or loaded already"):
            engine.load_adapter(pb.LoadAdapter(digest=digest, folder=str(folders["a"])))

    def test_a_refusal_is_told_and_unloading_what_was_refused_does_nothing(self, tmp_path):
        engine = self.engine()
        loaded = engine.load_adapter(pb.LoadAdapter(digest="x", folder=str(tmp_path / "nowhere")))
        assert "is not a folder" in loaded.refusal
        engine.unload_adapter(pb.UnloadAdapter(digest="x"))

    def test_a_new_connection_begins_without_any(self, folders):
        engine = self.engine()
        engine.load_adapter(pb.LoadAdapter(digest="a", folder=str(folders["a"])))
        engine.reset()
        engine.configure(configure_of(engine))
        with pytest.raises(ProtocolError, match="is not loaded"):
            engine.execute(self.plan(engine, "a"))
        assert engine._root == ROOT


class AdapterMachine(RuleBasedStateMachine):
    """Any order of loads and unloads; a step of five rows, each with any adapter that is there."""

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(AdapterMachine, "folders"):
            raise RuntimeError("set by the test")
        self.model = make_model(CASE)
        self.classes = {id(module): type(module) for module in self.model.modules()}
        self.step = Step(twin_kernels())
        self.adapters = Adapters(self.model, self.step)
        self.loaded: set[str] = set()

    @rule(name=st.sampled_from(NAMES))
    def load_or_unload(self, name):
        if name in self.loaded:
            self.adapters.unload(name)
            self.loaded.discard(name)
        else:
            assert self.adapters.load(name, self.folders[name]) > 0
            self.loaded.add(name)
        assert {each for each in NAMES if each in self.adapters} == self.loaded

    @rule(data=st.data())
    def run(self, data):
        names = data.draw(st.lists(st.sampled_from([BASE, *sorted(self.loaded)]), min_size=5, max_size=5))
        tokens = mx.array([[token] for token in range(7, 12)])
        batch = Batch([Span([0], 0, [0], True, ([0],), adapter=name) for name in names], block_size=1)
        self.step.adapters = StepAdapters.of(batch)
        try:
            logits = np.array(self.model(tokens, cache=make_prompt_cache(self.model)))
        finally:
            self.step.adapters = None
        for row, name in enumerate(names):
            np.testing.assert_allclose(logits[row, 0], self.expected[name][row, 0], atol=1e-4, rtol=1e-4)

    @invariant()
    def only_layers_of_loaded_adapters_are_changed(self):
        touched = {id(layer) for name in self.loaded for layer, _ in self.adapters._layers[name]}
        touched |= {id(owner) for name in self.loaded for _, owner in self.adapters._layers[name] if owner is not None}
        for module in self.model.modules():
            assert (type(module) is not self.classes[id(module)]) == (id(module) in touched)


AdapterMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_adapters_come_and_go_in_any_order_and_rows_never_mix(folders):
    tokens = mx.array([[token] for token in range(7, 12)])
    models = {BASE: make_model(CASE)} | {
        name: load_adapters(make_model(CASE), str(path)) for name, path in folders.items()
    }
    AdapterMachine.folders = folders
    AdapterMachine.expected = {}
    for name, model in models.items():
        model.eval()
        AdapterMachine.expected[name] = np.array(model(tokens, cache=make_prompt_cache(model)))
    AdapterMachine.TestCase("runTest").runTest()

"""How the attention and mixer classes of mlx-lm's models are run: a reviewed list, held against mlx-lm by the sweep.

Keyed by module and class, because what is said of one class holds for every family that is made of it.
"""

from enum import StrEnum

from mlx.nn.layers.base import Module

from worker import inspection

# Attend through handles: they do nothing with what a cache returns but hand it to an attention function.
_NATIVE = """
Klear.KlearAttention afmoe.Attention apertus.ApertusAttention bailing_moe.BailingMoeAttention
bailing_moe_linear.Attention bitnet.Attention cohere.Attention cohere2.Attention dbrx.Attention
deepseek.DeepseekAttention dots1.Dots1Attention ernie4_5.Attention ernie4_5_moe.Attention exaone.AttentionModule
exaone4.Attention exaone_moe.Attention falcon_h1.FalconH1Attention gear.Attention gemma.Attention
gemma3_text.Attention gemma3n.Gemma3nAttention gemma4_text.Attention glm.GLMAttention glm4.Glm4Attention
glm4_moe.Attention gpt2.Attention gpt_neox.Attention gpt_oss.AttentionBlock gptj.GPTJAttention granite.Attention
granitemoe.GraniteMoeAttention granitemoehybrid.GraniteMoeHybridAttention helium.HeliumAttention hunyuan.Attention
hunyuan_v1_dense.Attention internlm2.Attention internlm3.Attention iquestloopcoder.IQuestLoopCoderModel
jamba.JambaAttention laguna.Attention lfm2.Attention lfm2_moe.Attention lille-130m.Lille130mAttention llama.Attention
llama4_text.Attention mellum.Attention mimo.Attention mimo_v2_flash.Attention minicpm.Attention
minimax.MiniMaxAttention ministral3.Attention mixtral.MixtralAttention muse_glimmer.Attention nanbeige.Attention
nanochat.Attention nemotron.Attention nemotron-nas.Attention nemotron_h.NemotronHAttention olmo2.Attention
olmo3.Olmo3Attention olmo_hybrid.Attention olmoe.Attention openelm.Attention phi.PhiAttention phi3.Attention
phimoe.Attention phixtral.RoPEAttention plamo2.Attention plamo3.Attention qwen.Attention
qwen2.Attention qwen2_moe.Attention qwen3.Attention qwen3_moe.Attention qwen3_next.Qwen3NextAttention
recurrent_gemma.LocalAttentionBlock seed_oss.Attention spark2_5.Attention stablelm.Attention starcoder2.Attention
step3p5.Step3p5Attention talkie.Attention telechat3.Telechat3Attention
"""

# Latent attention: native too, but only in token rows, where it takes its absorbed path.
_LATENT = """
bailing_hybrid.MultiLatentAttention bailing_moe_v3.BailingMLA deepseek_v3.DeepseekV3Attention
glm4_moe_lite.Glm4MoeLiteAttention kimi_k3.KimiK3MLAAttention kimi_linear.KimiMLAAttention
longcat_flash.LongcatFlashMLA mistral4.Mistral4Attention
"""

# Latent attention that would cache expanded keys and values: folded by `worker.latent`, and then as those above.
_FOLDED = "deepseek_v2.DeepseekV2Attention minicpm3.Attention youtu_llm.YoutuLLMAttention"

# Recurrent mixers, whose rows are cut by `worker.mixers`.
_SPLIT = """
bailing_hybrid.LinearAttention bailing_moe_linear.LinearAttention bailing_moe_v3.BailingKDA falcon_h1.FalconH1Mixer
gear.ConvKVGatedMixer granitemoehybrid.GraniteMoeHybridMamba2Mixer jamba.JambaMambaMixer kimi_k3.KimiK3DeltaAttention
kimi_linear.KimiDeltaAttention lfm2.ShortConv lfm2_moe.ShortConv longcat_flash_ngram.NgramEmbedding mamba.MambaBlock
mamba2.Mamba2Block nemotron_h.NemotronHMamba2Mixer olmo_hybrid.GatedDeltaNet plamo2.Mamba qwen3_5.GatedDeltaNet
qwen3_next.Qwen3NextGatedDeltaNet recurrent_gemma.RecurrentBlock rwkv7.Rwkv7ChannelMixing rwkv7.Rwkv7TimeMixing
"""

# Mixers among those, whose every state may lie in slots of a pool that kernels update in place, by
# `worker.metal.state_updates`.
# Not kimi_k3's, which compiles its decode step over arrays.
_OVER_SLOTS = """
bailing_moe_v3.BailingKDA falcon_h1.FalconH1Mixer granitemoehybrid.GraniteMoeHybridMamba2Mixer
kimi_linear.KimiDeltaAttention lfm2.ShortConv lfm2_moe.ShortConv mamba2.Mamba2Block nemotron_h.NemotronHMamba2Mixer
olmo_hybrid.GatedDeltaNet plamo2.Mamba qwen3_5.GatedDeltaNet qwen3_next.Qwen3NextGatedDeltaNet
"""

# Native classes that turn queries, then keys, then attend, and do nothing else with turned queries.
_PLAIN_ROPE = """
bailing_moe.BailingMoeAttention cohere.Attention deepseek.DeepseekAttention dots1.Dots1Attention ernie4_5.Attention
ernie4_5_moe.Attention exaone4.Attention falcon_h1.FalconH1Attention gemma.Attention gemma3_text.Attention
glm.GLMAttention glm4.Glm4Attention glm4_moe.Attention granite.Attention granitemoe.GraniteMoeAttention
helium.HeliumAttention internlm2.Attention internlm3.Attention lfm2.Attention lfm2_moe.Attention llama.Attention
mimo.Attention minicpm.Attention mixtral.MixtralAttention nemotron.Attention olmo2.Attention olmo3.Olmo3Attention
olmoe.Attention phi3.Attention phimoe.Attention qwen2.Attention qwen2_moe.Attention qwen3.Attention
qwen3_moe.Attention qwen3_next.Qwen3NextAttention seed_oss.Attention starcoder2.Attention
"""

# Their calls are replaced by those of `worker.overrides`.
_OVERRIDE = "gemma2.Attention llama4.LlamaModel llama4.Attention"

# Reviewed, and better off with one forward for each sequence: they calculate with positions or with keys as they are.
_DENSE = """
afm7.Attention baichuan_m1.Attention deepseek_v32.DeepseekV32Attention gpt_bigcode.Attention minimax_m3_vl.Attention
muse_spark.Attention plamo.Attention phi3small.Attention
"""


class Treatment(StrEnum):
    """How a class is run."""

    NATIVE = "native"
    LATENT = "latent"
    FOLDED = "folded"
    SPLIT = "split"
    OVERRIDE = "override"
    DENSE = "dense"


TREATMENTS: dict[str, Treatment] = {
    name: treatment
    for treatment, names in (
        (Treatment.NATIVE, _NATIVE),
        (Treatment.LATENT, _LATENT),
        (Treatment.FOLDED, _FOLDED),
        (Treatment.SPLIT, _SPLIT),
        (Treatment.OVERRIDE, _OVERRIDE),
        (Treatment.DENSE, _DENSE),
    )
    for name in names.split()
}


def turns_queries_with_keys(cls: type) -> bool:
    """Whether an attention class lets a turned query go nowhere but to attention, and turns the keys right after."""
    return inspection.qualified_name(cls) in _PLAIN_ROPE.split()


def runs_over_slots(cls: type) -> bool:
    """Whether kernels may update a mixer class's states in place."""
    return inspection.qualified_name(cls) in _OVER_SLOTS.split()


def treatments_of(model: Module) -> dict[type, Treatment | None]:
    """How each class of the model that is given a cache is run; None for one that nobody has reviewed.

    Only the innermost such classes count, and of those in the list, the outermost: what is inside is theirs. A class
    that hands its cache on in one place is not taken for a user of it in another, where it has no attention.
    """
    found: dict[type, Treatment | None] = {}
    passers: set[type] = set()
    _walk(model, found, passers)
    return {cls: treatment for cls, treatment in found.items() if treatment is not None or cls not in passers}


def _walk(module: Module, found: dict[type, Treatment | None], passers: set[type]) -> bool:
    """Whether the module or anything in it uses a cache."""
    cls = type(module)
    known = TREATMENTS.get(inspection.qualified_name(cls))
    if known is not None:
        found[cls] = known
        if known is not Treatment.OVERRIDE:
            return True
    # An override of a whole model still leaves its layers to be run.
    inner = [_walk(child, found, passers) for child in inspection.children_of(module)]
    if any(inner):
        passers.add(cls)
        return True
    if known is None and inspection.takes_cache(cls):
        found.setdefault(cls, None)
        return True
    return known is not None

"""What each engine does with an exported drafter: which targets it can tap and which form
of the embedding scale it needs.

The tables were read in the sources of the versions named; docs/serving.md says how they are checked.
"""

from __future__ import annotations

from draftline.choices import Choices
from draftline.errors import ConfigError

VLLM, SGLANG = "vLLM 0.32", "SGLang 0.5.23"
ENGINES = ("auto", "vllm", "sglang", "dflash")

# Model classes with the hook that vLLM needs (SupportsEagle3).
_VLLM_TAPS = """
    AfmoeForCausalLM ApertusForCausalLM Cohere2MoeForCausalLM DeepseekForCausalLM
    DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM
    Ernie4_5ForCausalLM Gemma4ForCausalLM Gemma4ForConditionalGeneration GlmMoeDsaForCausalLM
    GptOssForCausalLM GraniteForCausalLM GraniteSWAForCausalLM InternLM3ForCausalLM
    KimiK25ForConditionalGeneration KimiLinearForCausalLM LagunaForCausalLM Llama4ForCausalLM
    Llama4ForConditionalGeneration LlamaForCausalLM LlavaForConditionalGeneration
    MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiniCPM3ForCausalLM
    MiniCPMForCausalLM MiniMaxM2ForCausalLM Ministral3ForCausalLM
    Mistral3ForConditionalGeneration MistralForCausalLM NemotronHForCausalLM
    Phi3ForCausalLM PixtralForConditionalGeneration Plamo3ForCausalLM Qwen2ForCausalLM
    Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
"""
# Model classes with SGLang's `set_dflash_layers_to_capture`.
_SGLANG_TAPS = """
    DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM
    InternLM3ForCausalLM KimiK25ForConditionalGeneration LagunaForCausalLM Lfm2ForCausalLM
    Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration Llama4ForCausalLM LlamaForCausalLM
    MiMoV2FlashForCausalLM MiMoV2ForCausalLM Ministral3ForCausalLM MistralForCausalLM
    NemotronHForCausalLM Phi3ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
"""
# Where SGLang's embedding module multiplies by itself; everywhere else it hands out bare rows, and
# it reads no key that says otherwise.
_SGLANG_SCALES = frozenset({"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"})


def check_engine(engine: str) -> None:
    """Raises ConfigError for a name that is no engine."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine={engine} is not one of {', '.join(ENGINES)}")


def obstacle(engine: str, architecture: str, embed_scale: float) -> str | None:
    """Why `engine` cannot draft for this target with any export, or None. `dflash` always can."""
    if engine == "vllm" and architecture not in _VLLM_TAPS.split():
        return f"{VLLM} has no hooks to read the hidden states of {architecture}"
    if engine == "sglang":
        if architecture not in _SGLANG_TAPS.split():
            return f"{SGLANG} has no hooks to read the hidden states of {architecture}"
        if embed_scale != 1.0 and architecture not in _SGLANG_SCALES:
            return (
                f"{SGLANG} does not multiply the embeddings that {architecture} lends to a drafter "
                f"(by {embed_scale:g}), nor does it read the key that says so"
            )
    return None


def choose_folding(engine: str, architecture: str, embed_scale: float, choices: Choices) -> bool:
    """Whether the embedding scale goes into the drafter's weights rather than into a key.

    vLLM gives the drafter bare embedding rows and reads no key: it needs the scale folded. SGLang's
    Gemma 4 gives it rows that are multiplied already: there the folded form would divide twice. For
    `dflash` the key is written, which is the layout's own form. `auto` takes the first of vllm,
    sglang and dflash that can serve the target, and records it. Without a scale there is one form
    only. Raises ConfigError for an engine that cannot serve this target.
    """
    check_engine(engine)
    if engine != "auto":
        problem = obstacle(engine, architecture, embed_scale)
        if problem is not None:
            raise ConfigError(
                f"--engine={engine}: {problem}; a newer version may: --engine=dflash writes the plain "
                "form with every key, --engine=auto the form of an engine that can"
            )
    if embed_scale == 1.0:
        return False
    if engine == "auto":
        able = [name for name in ENGINES[1:] if obstacle(name, architecture, embed_scale) is None]
        engine = able[0]
        what = "folded into the drafter's weights" if engine == "vllm" else "kept as a key"
        choices.record(
            "export.engine",
            wanted="auto",
            got=engine,
            reason=f"the first of vllm, sglang and dflash that can serve {architecture}, whose "
            f"embeddings are multiplied by {embed_scale:g}: the factor is {what}",
        )
    return engine == "vllm"

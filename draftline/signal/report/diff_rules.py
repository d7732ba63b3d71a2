"""Which differences between two runs explain another behaviour of memory, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Differences whose name matches `pattern` entirely. The higher `weight` (0 to 100), the more
    likely such a difference explains a change in memory; `why` is one sentence."""

    pattern: str
    weight: int
    why: str


LIKELY, POSSIBLE = 70, 40

# The first rule that matches counts. Names are those of `diff_facts`.
RULES = (
    Rule(
        r"compile\.switched off|variable\.(TORCH_COMPILE_DISABLE|TORCHDYNAMO_DISABLE)",
        100,
        "Where compiling is switched off every operation runs by itself and asks the allocator anew.",
    ),
    Rule(
        r"compile\.stance",
        98,
        "The stance decides whether a call that is not compiled yet compiles, fails, or silently runs "
        "eagerly with eager's memory.",
    ),
    Rule(
        r"compile\.flex_attention ran uncompiled",
        97,
        "Uncompiled, flex_attention builds every attention score in memory.",
    ),
    Rule(
        r"compile\.outcome of .*",
        96,
        "This part of the step was prepared in another way, so it runs with another memory plan.",
    ),
    Rule(
        r"compile\.(frames left uncompiled|graph breaks|functions at the recompile limit)",
        95,
        "Parts of the step run uncompiled, where their intermediate results are separate tensors.",
    ),
    Rule(
        r"compile\.(recompiles|compiles in the steady state)",
        94,
        "A compile in the middle of a run takes memory of its own and ends with another plan.",
    ),
    Rule(
        r"compile\.(graphs compiled|parts warmed|parts warmed late|the program expects)",
        92,
        "What was not compiled before the first step compiles later or never.",
    ),
    Rule(
        r"capture\..*|choice\..*(capture|forwards).*|config\.target\.capture",
        90,
        "A captured graph replays with fixed addresses and asks the allocator for nothing; what is not "
        "captured does, in every step.",
    ),
    Rule(
        r"choice\..*compile.*",
        88,
        "This function was compiled in one run only, or by other means.",
    ),
    Rule(
        r"version\.torch",
        86,
        "Another PyTorch has another allocator, compiler and memory planner.",
    ),
    Rule(
        r"version\.triton|environment\.CUDA of PyTorch",
        84,
        "Generated kernels and libraries differ, and with them what they need as workspace.",
    ),
    Rule(
        r"variable\.PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|variable\.PYTORCH_NO_CUDA_MEMORY_CACHING",
        82,
        "It sets how the allocator takes memory from the device, splits it and gives it back.",
    ),
    Rule(
        r"shape\..*",
        80,
        "Each new size that a step sees may need memory that no earlier one left free.",
    ),
    Rule(
        r"config\.(token_budget|block_size|max_anchors|max_batch_size|data\.max_length"
        r"|target\.batches|loss\.chunk_rows|topology\.slots|train\.packs_per_step)",
        76,
        "It sets the sizes of the tensors of a step.",
    ),
    Rule(
        r"processes\..*",
        74,
        "The device's memory is everybody's: another process moves it too.",
    ),
    Rule(
        r"environment\.GPUs",
        70,
        "Another GPU selects other kernels, and another size of memory moves the limit.",
    ),
    Rule(
        r"environment\.driver|environment\.CUDA of the driver",
        66,
        "The driver keeps memory of its own and decides how allocations are mapped.",
    ),
    Rule(
        r"variable\.(TORCHINDUCTOR|TRITON)_CACHE_DIR",
        30,
        "Another compile cache makes the start shorter or longer, not the steps.",
    ),
    Rule(
        r"variable\.(CUDA|NVIDIA)_VISIBLE_DEVICES|variable\.(LOCAL_)?WORLD_SIZE",
        50,
        "Other GPUs of the machine may have other neighbours on them.",
    ),
    Rule(
        r"variable\.(TORCH|PYTORCH|TRITON|CUDA|CUBLAS|CUDNN|NCCL).*",
        64,
        "It changes how kernels are made or started, and what libraries reserve.",
    ),
    Rule(
        r"version\.(transformers|accelerate|flash-attn|liger-kernel|draftline)|environment\.(commit|"
        r"sources modified)",
        60,
        "The code of the step may differ.",
    ),
    Rule(
        r"config\.(target|drafter|topology)\..*|config\.(features\.source|loss\.(kind|soft_labels))|"
        r"config\.train\.ema|choice\..*",
        56,
        "It changes which tensors exist, on which device, and how large they are.",
    ),
    Rule(
        r"config\.evaluate\..*|config\.train\.(checkpoint_every|keep_checkpoints|log_every)",
        46,
        "It changes what happens between steps, and how often.",
    ),
    Rule(
        r"config\.data\..*",
        42,
        "Other data have other lengths; where every step has one size that changes nothing.",
    ),
    Rule(
        r"compile\.(seconds|graphs from the cache)",
        28,
        "It tells how warm the compile cache was; the steps afterwards are the same.",
    ),
    Rule(
        r"variable\..*|environment\.(CPUs|CPU limit|memory|memory limit|container|kernel|platform)",
        24,
        "It belongs to the host, and bears on speed more than on device memory.",
    ),
    Rule(
        r"config\..*",
        20,
        "It changes numbers, not sizes.",
    ),
    Rule(r"version\..*|environment\..*", 16, "It is seldom part of a step."),
)
_REST = Rule(".*", 10, "No rule connects it with memory.")

# Paths and moments differ between any two runs and explain nothing.
LEFT_OUT = re.compile(
    r"config\.(run\.dir|features\.dir)|choice\.(run|features)\.dir|config\.train\.trackers"
)


def rule_for(name: str) -> Rule:
    """The first rule that covers a difference of this name."""
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, name)), _REST)

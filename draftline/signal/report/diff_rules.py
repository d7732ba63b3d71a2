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

# Weight, patterns (any of its lines) and reason; the first rule that matches counts. Names are those of
# `diff_facts`.
_TABLE = r"""
100 compile\.switched off|variable\.(TORCH_COMPILE_DISABLE|TORCHDYNAMO_DISABLE)
        Where compiling is switched off every operation runs by itself and asks the allocator anew.
98  compile\.stance
        The stance decides whether a call that is not compiled yet compiles, fails, or silently runs
        eagerly with eager's memory.
97  compile\.flex_attention ran uncompiled
        Uncompiled, flex_attention builds every attention score in memory.
96  compile\.outcome of .*
        This part of the step was prepared in another way, so it runs with another memory plan.
95  compile\.(frames left uncompiled|graph breaks|functions at the recompile limit)
        Parts of the step run uncompiled, where their intermediate results are separate tensors.
94  compile\.(recompiles|compiles in the steady state)
        A compile in the middle of a run takes memory of its own and ends with another plan.
92  compile\.(graphs compiled|parts warmed|parts warmed late|the program expects)
        What was not compiled before the first step compiles later or never.
90  capture\..*|choice\..*(capture|forwards).*|config\.target\.capture
        A captured graph replays with fixed addresses and asks the allocator for nothing; what is
        not captured does, in every step.
88  choice\..*compile.*
        This function was compiled in one run only, or by other means.
86  version\.torch
        Another PyTorch has another allocator, compiler and memory planner.
84  version\.triton|environment\.CUDA of PyTorch
        Generated kernels and libraries differ, and with them what they need as workspace.
82  variable\.PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|variable\.PYTORCH_NO_CUDA_MEMORY_CACHING
        It sets how the allocator takes memory from the device, splits it and gives it back.
80  shape\..*
        Each new size that a step sees may need memory that no earlier one left free.
76  config\.(token_budget|block_size|max_anchors|max_batch_size|data\.max_length)
    config\.(target\.batches|loss\.chunk_rows|topology\.slots|train\.packs_per_step)
        It sets the sizes of the tensors of a step.
74  processes\..*
        The device's memory is everybody's: another process moves it too.
70  environment\.GPUs
        Another GPU selects other kernels, and another size of memory moves the limit.
66  environment\.driver|environment\.CUDA of the driver
        The driver keeps memory of its own and decides how allocations are mapped.
30  variable\.(TORCHINDUCTOR|TRITON)_CACHE_DIR
        Another compile cache makes the start shorter or longer, not the steps.
50  variable\.(CUDA|NVIDIA)_VISIBLE_DEVICES|variable\.(LOCAL_)?WORLD_SIZE
        Other GPUs of the machine may have other neighbours on them.
64  variable\.(TORCH|PYTORCH|TRITON|CUDA|CUBLAS|CUDNN|NCCL).*
        It changes how kernels are made or started, and what libraries reserve.
60  version\.(transformers|accelerate|flash-attn|liger-kernel|draftline)
    environment\.(commit|sources modified)
        The code of the step may differ.
56  config\.(target|drafter|topology)\..*|config\.(features\.source|loss\.(kind|soft_labels))
    config\.train\.ema|choice\..*
        It changes which tensors exist, on which device, and how large they are.
46  config\.evaluate\..*|config\.train\.(checkpoint_every|keep_checkpoints|log_every)
        It changes what happens between steps, and how often.
42  config\.data\..*
        Other data have other lengths; where every step has one size that changes nothing.
28  compile\.(seconds|graphs from the cache)
        It tells how warm the compile cache was; the steps afterwards are the same.
24  variable\..*|environment\.(CPUs|CPU limit|memory|memory limit|container|kernel|platform)
        It belongs to the machine, and bears on speed more than on device memory.
20  config\..*
        It changes numbers, not sizes.
16  version\..*|environment\..*
        It is seldom part of a step.
"""
RULES = tuple(
    Rule("|".join(patterns.split("\n    ")), int(weight), " ".join(why.split()))
    for weight, patterns, why in re.findall(
        r"^(\d+) +(.+(?:\n {4}\S.*)*)\n((?: {8}.*\n)+)", _TABLE, re.MULTILINE
    )
)
_REST = Rule(".*", 10, "No rule connects it with memory.")

# Paths and moments differ between any two runs and explain nothing.
LEFT_OUT = re.compile(
    r"config\.(run\.dir|features\.dir)|choice\.(run|features)\.dir|config\.train\.trackers"
)


def rule_for(name: str) -> Rule:
    """The first rule that covers a difference of this name."""
    return next((rule for rule in RULES if re.fullmatch(rule.pattern, name)), _REST)

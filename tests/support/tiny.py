"""A target small enough to be built anew in every test, with a drafter and data to match."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftline.choices import Choices
from draftline.data.batches import derive_table
from draftline.data.packing import Pack, build_pack
from draftline.data.store import Sample
from draftline.decode.propose import DraftModel
from draftline.decode.session import Decoded, DecodeSession
from draftline.model.drafter.backbone import Drafter, DrafterShape
from draftline.model.drafter.losses import LossSpec
from draftline.model.target.target import Target
from draftline.runtime.compile.gate import CompileGate
from draftline.train.features.forwards import Capture, TargetForwards
from draftline.train.step.optim import OptimizerSpec
from draftline.train.step.pack_tensors import PackTensors
from draftline.train.step.step import StepKernels, StepSpec, TrainStep, compile_kernels

CPU = torch.device("cpu")
STOP, MASK = 3, 7


class TinyTokenizer:
    """One character a token; the ids below 8 are specials, `<s>`, `<e>` (the stop), `<user>`, ..."""

    is_fast = True
    chat_template = "{{ messages }}"
    bos_token_id = 1
    eos_token_id = STOP
    pad_token_id = 0
    _SPECIALS = ("<pad>", "<s>", "<unk>", "<e>", "<user>", "<assistant>", "<system>", "<mask>")

    def __init__(self, vocab: int = 64) -> None:
        self._text = list(self._SPECIALS) + [chr(ord("A") + i) for i in range(vocab - 8)]
        self._id = {text: i for i, text in enumerate(self._text)}

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        pieces = re.findall(r"<[a-z]+>|.", text, re.S)
        return {"input_ids": [self._id.get(piece, 2) for piece in pieces]}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._text[i] for i in ids)

    def apply_chat_template(
        self, turns: Sequence[dict[str, str]], *, add_generation_prompt: bool = False, **_: object
    ) -> str:
        text = "<s>" + "".join(f"<{t['role']}>{t['content']}<e>" for t in turns)
        return text + ("<assistant>" if add_generation_prompt else "")


def build_model(
    *, vocab: int = 64, hidden: int = 32, layers: int = 4, seed: int = 0, sharpness: float = 3.0
) -> LlamaForCausalLM:
    """A random Llama whose head rows all have the norm `sharpness`, which is the logits' deviation."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden + 16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=STOP,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        head = model.lm_head.weight
        head.copy_(sharpness * head / head.norm(dim=1, keepdim=True))
    return model


def build_target(
    *,
    taps: Sequence[int] = (0, 2),
    stop: Sequence[int] = (STOP,),
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    **model: Any,
) -> Target:
    built = build_model(**model)
    target = Target(built.to(device, dtype), TinyTokenizer(built.config.vocab_size), taps=taps)
    target.stop_ids = tuple(stop)
    return target


def build_shape(target: Target, **changes: Any) -> DrafterShape:
    """Heads whose total width is not the hidden size, grouped two to a KV head."""
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "num_taps": len(target.taps),
        "block_size": 4,
        "mask_token_id": MASK,
        "rope_theta": 1e4,
    }
    return DrafterShape(**(values | changes))


def build_drafter(shape: DrafterShape, *, seed: int = 0, std: float = 0.25) -> Drafter:
    """Weights so large that every input matters, norms and feature scale unlike one another."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(shape)
    with torch.no_grad():
        for tensor in (*drafter.parameters(), drafter.feature_scale):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(std * noise if tensor.ndim > 1 else 1 + 0.3 * noise)
    return drafter.requires_grad_(False)


def build_samples(
    lengths: Sequence[int], *, vocab: int = 64, prompt: int = 3, seed: int = 0
) -> list[Sample]:
    """Random tokens; all but the first `prompt` of each sample are supervised."""
    random = np.random.default_rng(seed)
    return [
        Sample(
            id=str(i),
            input_ids=random.integers(8, vocab, n).astype(np.int32),
            loss_mask=np.arange(n) >= prompt,
            truncated=False,
        )
        for i, n in enumerate(lengths)
    ]


def whole_pack(samples: Sequence[Sample]) -> Pack:
    """All samples in one pack."""
    return Pack(tuple(range(len(samples))), sum(len(s.input_ids) for s in samples))


def build_forwards(
    target: Target,
    samples: Sequence[Sample],
    budget: int,
    *,
    soft: bool = False,
    capture: Capture = "never",
) -> TargetForwards:
    """The forwards of one worker for packs of these samples."""
    lengths = [len(s.input_ids) for s in samples]
    return TargetForwards(
        target,
        derive_table(lengths, batch_tokens=budget, most_rows=8, pack_members_hint=8),
        last_hidden=soft,
        token_budget=budget,
        capture=capture,
        choices=Choices(),
    )


def pack_tensors(
    target: Target, samples: Sequence[Sample], budget: int, block: int, *, soft: bool = False
) -> PackTensors:
    """All samples in one pack with the target's features, and its last hidden states if `soft`."""
    pack = whole_pack(samples)
    forwards = build_forwards(target, samples, budget, soft=soft)
    forwards.run(samples, pack)
    return PackTensors.build(build_pack(samples, pack, budget, block), forwards.row)


def step_spec(
    *,
    budget: int,
    max_anchors: int,
    loss: LossSpec | None = None,
    noise: float = 0.0,
    seed: int = 1,
    gather: bool = False,
    **optimizer: Any,
) -> StepSpec:
    """A constant rate after one step, no decay, a clip at 1."""
    settings: dict[str, Any] = {
        "peak": 3e-3,
        "total_steps": 100,
        "warmup_ratio": 0.0,
        "min_ratio": 1.0,
        "betas": (0.9, 0.95),
        "weight_decay": 0.0,
        "clip": 1.0,
        "ema": None,
    }
    return StepSpec(
        loss=loss or LossSpec("decay", 3.0, 0.5, 0.0, 64),
        optimizer=OptimizerSpec(**(settings | optimizer)),
        max_anchors=max_anchors,
        token_budget=budget,
        noise=noise,
        seed=seed,
        gather=gather,
    )


def build_step(
    target: Target,
    drafter: Drafter,
    spec: StepSpec,
    *,
    token_ids: Tensor | None = None,
    kernels: StepKernels | None = None,
) -> TrainStep:
    """The step of one drafter, with kernels of its own unless they are given."""
    if kernels is None:
        kernels = compile_kernels(CompileGate(Choices()), target.ends(CPU), token_ids, spec)
    drafter.requires_grad_(True)
    soft = spec.loss.soft_labels > 0
    return TrainStep(
        drafter,
        kernels,
        spec,
        working_dtype=target.dtype,
        width=(len(target.taps) + soft) * target.hidden_size,
    )


def decode(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    new: int,
    *,
    token_ids: Tensor | None = None,
) -> Decoded:
    """Greedy decoding of all prompts in one batch, plain without a drafter."""
    draft = None if drafter is None else DraftModel(drafter, token_ids)
    block = 1 if drafter is None else drafter.shape.block_size
    slots = max(map(len, prompts)) + new + block
    return DecodeSession(target, draft, rows=len(prompts), slots=slots).decode(prompts, new)


def teach(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    *,
    new: int = 40,
    steps: int = 60,
) -> Drafter:
    """`drafter` trained on the target's own greedy continuations, so that much is accepted."""
    samples = []
    for prompt, tokens in zip(prompts, decode(target, None, prompts, new).tokens, strict=True):
        ids = np.array(prompt + tokens, np.int32)
        samples.append(Sample("", ids, np.arange(len(ids)) >= len(prompt), False))
    budget = sum(len(s.input_ids) for s in samples)
    pack = pack_tensors(target, samples, budget, drafter.shape.block_size)
    step = build_step(target, drafter, step_spec(budget=budget, max_anchors=min(48, budget)))
    for number in range(steps):
        step(pack, number)
    return drafter.requires_grad_(False)


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Whether both hold the same tensors to the last bit."""
    assert one.keys() == two.keys()
    return all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def refuse_system_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's template is one that takes no system turn at the beginning."""
    plain = TinyTokenizer.apply_chat_template

    def strict(self: TinyTokenizer, turns: list[dict[str, str]], **rest: Any) -> str:
        if turns[0]["role"] == "system":
            raise TemplateError("System role not supported")
        return plain(self, turns, **rest)

    monkeypatch.setattr(TinyTokenizer, "apply_chat_template", strict)


def chi_square_p(observed: Tensor, expected: Tensor) -> float:
    """How likely counts at least this far from `expected` counts are; cells under 5 are pooled."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    assert observed.sum().item() == round(expected.sum().item())
    assert int(observed[expected < 1e-9].sum()) == 0, "something impossible happened"
    big = expected >= 5
    seen = torch.cat([observed[big], observed[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    seen, wanted = seen[wanted > 1e-9], wanted[wanted > 1e-9]
    if len(wanted) < 2:
        return 1.0  # nothing is left to chance
    statistic = ((seen - wanted).square() / wanted).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))

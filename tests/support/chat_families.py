# ruff: noqa: RUF001
"""Chat templates of families, written out minimally, each with a small tokenizer that has its marks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
# As Llama 3 and Qwen split text: newlines in one piece, a space with the word after it.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Family:
    """Its special tokens, in which those that stop it, and the text that begins every prompt."""

    special: tuple[str, ...]
    stops: tuple[str, ...]
    bos: str | None = None
    plain: tuple[str, ...] = ()


FAMILIES = {
    "qwen3": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
                    ("<|im_end|>", "<|endoftext|>"),
                    plain=("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "llama3": Family(("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
                     ("<|eot_id|>",), "<|begin|>"),
    "gemma3": Family(("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
                     ("<end_of_turn>", "<eos>"), "<bos>"),
    "gemma4": Family(("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<eos>",
                      "<|tool_call>", "<tool_call|>", '<|"|>', "<tool|>", "<|tool>"),
                     ("<turn|>", "<eos>"), "<bos>"),
    "phi4": Family(("<|im_start|>", "<|im_sep|>", "<|im_end|>"), ("<|im_end|>",)),
    "gpt_oss": Family(("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
                      ("<|return|>", "<|call|>")),
    "smollm3": Family(("<|im_start|>", "<|im_end|>"), ("<|im_end|>",), plain=("<think>", "</think>")),
    "granite": Family(("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
                      ("<|end_of_text|>",)),
    "command_r": Family(("<BOS>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
                         "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>",
                         "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>",
                         "<|START_ACTION|>", "<|END_ACTION|>"), ("<|END_OF_TURN_TOKEN|>",), "<BOS>"),
    "olmo2": Family(("<|endoftext|>",), ("<|endoftext|>",), "<|endoftext|>"),
    "mistral": Family(("<s>", "</s>", "[INST]", "[/INST]"), ("</s>",), "<s>"),
    "glm4": Family(("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>",
                    "<|endoftext|>"), ("<|endoftext|>", "<|user|>", "<|observation|>"),
                   plain=("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "deepseek_r1": Family(("<｜begin｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
                           "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
                          ("<｜end▁of▁sentence｜>",), "<｜begin｜>", ("<think>", "</think>")),
    "qwq": Family(("<|im_start|>", "<|im_end|>"), ("<|im_end|>",), plain=("<think>", "</think>")),
    "nemotron": Family(("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"), ("<SPECIAL_12>",),
                       plain=("<think>", "</think>")),
}  # fmt: skip


@cache
def tokenizer_of(name: str) -> Any:
    """A byte-level tokenizer with merges over leading spaces, and the family's marks and template."""
    family = FAMILIES[name]
    raw = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    raw.decoder = decoders.ByteLevel()
    lines = ["Add two and three. Five. Eleven and six?\n\nuser assistant model system think look"]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(lines * 3, trainer)
    raw.add_special_tokens([AddedToken(text, special=True) for text in family.special])
    raw.add_tokens([AddedToken(text, special=False) for text in family.plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=family.stops[0], bos_token=family.bos
    )
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def stop_ids_of(name: str) -> tuple[int, ...]:
    return tuple(tokenizer_of(name).convert_tokens_to_ids(list(FAMILIES[name].stops)))
